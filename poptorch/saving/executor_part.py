"""Save an executor's program into a file, and use one from a file."""

from collections.abc import Callable
from typing import Any

from ipu_dynamo.saved.archive import Archive
from ipu_dynamo.saved.refusal import SavedProgramError
from ipu_dynamo.whole_step.cache.ready_made import ReadyMade
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.saving.load import Opened
from poptorch.arguments import CallArguments
from poptorch.core_errors import core_errors
from poptorch.errors import createPoptorchError
from poptorch.executor.optimizer_in_use import OptimizerInUse
from poptorch.executor.traced_model import TracedModel
from poptorch.optim import Optimizer
from poptorch.saving import files
from poptorch.weights import DeviceWeights

_ALL = ("parameter", "buffer", "state", "loss_scale")  # kinds of variables that last


class SavedPrograms(DeviceWeights):
    """The part of an executor that writes and reads files."""

    _adapter: TracedModel | None
    _made_from: Any
    _training: bool
    _update: OptimizerInUse | None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def _compile(self, call: CallArguments, ready: ReadyMade | None = None) -> None:
        raise NotImplementedError

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the program with all that belongs to it into a file, which `poptorch.load` and
        `loadExecutable` read. The file is replaced as a whole.

        Args:
            filename: missing folders are made; in a folder the file is called model.poptorch.
            export_model: pickle model and optimizer, too, so that `poptorch.load` needs neither.
            save_rng_state: random numbers go on where they are now.

        Raises:
            poptorch.Error: nothing is compiled, or it cannot be saved.
            AssertionError: a part of the path is a file.
        """
        core = self._ready()
        path = files.target(filename)
        self._follow()

        def write() -> None:
            assert self._adapter is not None
            self._send()
            if self._update is not None:
                self._update.upload()
            self.copyWeightsToHostIfNeeded()
            optimizer = None if self._update is None else self._update.optimizer
            with core_errors(f"saving {path}", self._options):
                files.write(
                    path,
                    core,
                    self._adapter.call,
                    self._options,
                    training=self._training,
                    random_state=save_rng_state,
                    exported=(self.model, optimizer) if export_model else None,
                )

        self._weights.lock.run(write)

    def compileAndExport(
        self, filename: str, *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """Compile for calls with these arguments, and `save` the program.

        Args:
            filename: as for `save`.
            args: positional arguments, as for a call.
            export_model: as for `save`.
            kwargs: keyword arguments, as for a call.
        """
        self.compile(*args, **kwargs)
        self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: str) -> None:
        """Use the program of a file, instead of compiling one, with the model's own weights.

        The model is traced with the arguments that the program was compiled for; it and the options
        have to be those that the program was compiled from.

        Args:
            filename: of the file.

        Raises:
            poptorch.Error: this version cannot read the file, or it is of another model.
        """
        try:
            with Archive(filename) as archive:
                problem = files.check_version(archive)
                if problem is None:
                    call, opened = files.read_call(archive), files.opened(archive)
        except SavedProgramError as error:
            raise createPoptorchError(
                f"Invalid file {filename}: {error}", id="saved-program"
            ) from error
        if problem is not None:
            raise createPoptorchError(f"Invalid file {filename}: {problem}", id="saved-program")
        if self.isCompiled():
            self.destroy()
        self._weights.lock.run(lambda: self._install(call, opened))

    def _install(self, call: CallArguments, opened: Opened, *, whole: bool = False) -> None:
        """Compile with the program of a file.

        Args:
            whole: weights and the optimiser's state are those of the file, too.
        """
        self._compile(call, opened.ready())
        core: CompiledModel = self._ready()
        if whole:
            opened.restore(core, _ALL)
            optimizer = None if self._update is None else self._update.optimizer
            if isinstance(optimizer, Optimizer):
                optimizer.ipu_state_is_dirty, optimizer.host_state_is_dirty = False, True
        if opened.entry.seed is not None:
            core.set_random_state(opened.entry.seed, opened.entry.step)


def read_whole(
    filename: str, edit: Callable[[Any], Any] | None
) -> tuple[files.Exported, CallArguments, Opened]:
    """All that a file has.

    Raises:
        AssertionError: this version cannot read the file, or the file has no model.
        poptorch.Error: it is another user's, and not trusted.
    """
    try:
        with Archive(filename) as archive:
            if (problem := files.check_version(archive)) is not None:
                raise AssertionError(f"Invalid file {filename}: {problem}")
            if not archive.head["exported"]:
                raise AssertionError(
                    f"Invalid file {filename}: it was written with export_model=False, so there is "
                    "no model in it: make an executor of your model, and use "
                    "executor.loadExecutable()"
                )
            call, opened = files.read_call(archive), files.opened(archive)
            return files.read_exported(archive, edit), call, opened
    except SavedProgramError as error:
        raise AssertionError(f"Invalid file {filename}: {error}") from error
