"""Run a model on IPUs: compile at the first call, then keep weights and optimizer in step."""

import datetime
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ipu_dynamo.capture.private.tracing import unrecorded
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch._logging import logger
from poptorch.arguments import CallArguments, ExpectedCall, bind, parameters_of
from poptorch.core_errors import core_errors
from poptorch.enums import ConnectionType
from poptorch.errors import createPoptorchError, require
from poptorch.executor.anchors import Anchors
from poptorch.executor.compilation import Compilation
from poptorch.executor.executable import ExecutableInfo, ExecutableInputs
from poptorch.executor.members import ModelMembers
from poptorch.executor.optimizer_in_use import OptimizerInUse
from poptorch.executor.optimizer_setting import OptimizerSetting
from poptorch.executor.perf_counters import PerfCounters
from poptorch.executor.program_export import program_json
from poptorch.executor.random_state import DeviceRandomState
from poptorch.executor.replica_grouping import Grouping
from poptorch.executor.traced_model import TracedModel
from poptorch.options import Options, adopt
from poptorch.saving.executor_part import SavedPrograms
from poptorch.translate import automatic_loss_scaling
from poptorch.unwrapping import rewrap_model
from poptorch.weights import note_trainers
from poptorch.wrapping import Wrapping

if TYPE_CHECKING:
    from ipu_dynamo.machine.prediction import Prediction


class PoplarExecutor(
    ModelMembers, Compilation, OptimizerSetting, SavedPrograms, DeviceRandomState, PerfCounters
):
    """A model on IPUs. Made by `trainingModel` and `inferenceModel`, or a subclass of a program.

    Args:
        model: is called while tracing; shares its tensors with `user_model`.
        options: the user's, frozen from now on; the executor has a complete copy of its own.
        training: whether calls train.
        poptorch_version: of the package that made it.
        optimizer: what trains.
        user_model: the user's module or function.

    Attributes:
        per_replica_params: the arguments of `replicaGrouping`, by the parameter's dotted name.
    """

    def __init__(
        self,
        model: Any,
        options: Options | None,
        training: bool,
        poptorch_version: str,
        optimizer: torch.optim.Optimizer | None = None,
        user_model: Any = None,
    ) -> None:
        made_from = model if user_model is None else user_model
        options = adopt(options, training=training, optimizer=optimizer)
        super().__init__(options, model)
        self._traced, self._training, self._made_from = model, training, made_from
        self._poptorch_version = poptorch_version
        self._parameters = parameters_of(model)
        self.per_replica_params: dict[str, Grouping] = {}
        self._adapter: TracedModel | None = None
        self._anchors: Anchors | None = None
        self._expected: ExpectedCall | None = None
        self._warned_about_layout = self._warned_about_mode = False
        self._executable: ExecutableInfo | None = None
        self._executable_inputs: ExecutableInputs | None = None
        self._compile_seconds: float | None = None
        self._predicted: Prediction | None = None
        self._counts_cycles = bool(options._Popart.options["instrumentWithHardwareCycleCounter"])
        self._has_run = False
        self._wrapping: Wrapping | None = None
        self._update: OptimizerInUse | None = None
        if training:
            assert optimizer is not None, "training needs an optimizer"
            self._update = OptimizerInUse(
                optimizer,
                relaxed=options._relax_optimizer_checks,
                automatic_loss_scaling=automatic_loss_scaling(options) is not None,
            )
            self._wrap()

    def compilationTime(self) -> datetime.timedelta:
        """How long the last compilation took."""
        if self._compile_seconds is None:
            raise createPoptorchError(
                "Please compile the model before obtaining compilation time.", id="call"
            )
        if not self._options._show_progress_bar:
            raise createPoptorchError(
                "Please set showCompilationProgressBar option to obtain compilation time.",
                id="option",
            )
        return datetime.timedelta(seconds=self._compile_seconds)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for calls with arguments like these, without running them.

        Args:
            args: as for a call.
            kwargs: as for a call.
        """
        if self.isCompiled():
            logger.warning("The model is compiled already: call destroy() to compile it again")
            return
        self._follow()

        def compile_() -> None:
            self._compile(bind(self._parameters, args, kwargs))
            assert self._core is not None
            self._core.finish_compiling()

        self._weights.lock.run(compile_)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, compiling it first if needed.

        Args:
            args: positional arguments of the model's forward. Dimension 0 of each tensor is that of
                a micro-batch, multiplied by device iterations, gradient accumulation and input
                groups.
            kwargs: keyword arguments of the model's forward, with tensors of the same form.

        Returns:
            what forward returned while it was traced, with the tensors of this call.
        """
        if not self._attached:
            require(
                self._options.connection_type != ConnectionType.Never,
                "Trying to run a model on an offline device (ConnectionType.Never): use "
                "model.compile(inputs) instead of model(inputs)",
            )
        self._follow()

        def run() -> Any:
            call = bind(self._parameters, args, kwargs)
            if not self.isCompiled():
                self._compile(call)
            if not self._attached:
                self._attach()
            return self._run(call)

        return self._weights.lock.run(run)

    def _debugGetPopartIR(self) -> str:
        """The compiled program as JSON: see `program_json`."""
        return program_json(self._ready().program)

    def destroy(self) -> None:
        """Drop the program; the host keeps the newest weights, in the classes they had first."""

        def drop() -> None:
            self.copyWeightsToHostIfNeeded()
            if self._update is not None:
                self._update.connect(None)
            if self._core is not None:
                self._core.executable.stop_compiling()
            self._core = self._adapter = self._expected = self._executable = None
            self._anchors = self._predicted = None
            self._weights.disconnect()
            self._compile_seconds = None
            self._detach()
            if self._wrapping is not None:
                self._wrapping.remove()
                self._wrapping = None

        if self._wrapping is not None:
            rewrap_model(self._made_from)  # so that `drop` can remove the wrapping
            note_trainers()  # the classes will not show any more that this one has trained
        self._weights.lock.run(drop)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # bound here: when the interpreter ends, the names of modules go before the last objects
        if self.__dict__.get("_wrapping") is not None and not _ending():
            # Python drops exceptions of a signal's handler here, and the host would not get the
            # trained weights. The executor may be freed while a model is traced.
            with DeferredSignals(), unrecorded():
                self.destroy()

    def _run(self, call: CallArguments) -> Any:
        assert self._core is not None
        assert self._adapter is not None
        assert self._anchors is not None
        assert self._expected is not None
        inputs = self._expected.tensors(call)
        if not (self._warned_about_layout or all(map(Tensor.is_contiguous, inputs))):
            self._warned_about_layout = True
            logger.warning("An input is not contiguous: it is copied at every call")
        self._warn_about_mode(self._core)
        self._send()
        if self._update is not None:
            self._update.upload()
            self._weights.modify_device()  # first: a call that fails may have made some steps
            self._update.steps_begin()
        try:
            leaves = self._core.run(inputs)
            if self._anchors.asked:
                self._anchors.follow(self._core, self._state)
        except Exception:
            with core_errors(f"running {self._name()}", self._options):
                raise
        self._has_run = True
        if self._counts_cycles:
            self._log_cycles()
        return self._adapter.restore(leaves)

    def _warn_about_mode(self, core: CompiledModel) -> None:
        """Warn once where train() or eval() was called since: PopTorch takes no notice."""
        if not self._warned_about_mode and (change := core.changed_mode) is not None:
            self._warned_about_mode = True
            logger.warning(
                "%s: the program goes on in the mode that it was compiled in. Call destroy() on "
                "the executor to compile for the other one, or make an executor for each",
                change[0].upper() + change[1:],
            )
