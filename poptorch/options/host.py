"""Choose the files, messages and caches on the host."""

from pathlib import Path

import torch

import ipu_dynamo.errors
from poptorch._logging import logger
from poptorch.options.container import OptionsDict
from poptorch.options.effects import Effect, setter
from poptorch.options.engine import options_of_environment
from poptorch.options.popart import _PopartOptions

_UNLIMITED = 2**64 - 1
_PACKAGES = (__file__, ipu_dynamo.errors.__file__, torch.__file__)


def default_location_excludes() -> list[str]:
    """Parts of file names whose frames are not the user's: this package, the core, and torch."""
    ours, core, theirs = (Path(file).parent for file in _PACKAGES)
    return [str(ours.parent), str(core), str(theirs)]


class HostOptions(OptionsDict):
    """The setters of `Options` for files, logs and messages."""

    _popart: _PopartOptions
    _source_location_excludes: list[str]
    _relax_optimizer_checks: bool
    _show_progress_bar: bool
    _module_namescope_enabled: bool
    _device_of_tensors: str  # what tensors show in forward: "ipu", or "cpu" as outside of it

    @setter(Effect.HOST)
    def logDir(self, log_dir: str) -> None:
        """Choose the folder of files about a compilation; it is created when needed.

        At the log levels DEBUG_IR and TRACE each program that is compiled is written into it.

        Args:
            log_dir: path of the folder.
        """
        self.set(log_dir=log_dir)

    @setter(Effect.HOST)
    def maxRepeatLogs(self, max_lines: int | None) -> None:
        """Write an identical message of the compiler at most so often; None: always.

        Args:
            max_lines: how often one message is written.
        """
        self.set(max_repeat_logs=_UNLIMITED if max_lines is None else max_lines)

    @setter(Effect.MACHINE)
    def modelName(self, name: str) -> None:
        """Choose the folder of profile reports, instead of "training" or "inference".

        Args:
            name: name of the folder.
        """
        self.createOrSet(model_name=name)

    @setter(Effect.HOST)
    def enableExecutableCaching(self, path: str | None) -> None:
        """Keep compiled programs in folder `path`; None or "" keeps none.

        Args:
            path: of the folder.
        """
        if path:
            self._popart.store("cachePath", path)
        self._popart.store("enableEngineCaching", bool(path))

    @setter(Effect.MACHINE)
    def logCycleCount(self, log_cycle_count: bool) -> None:
        """Let `cycleCount` predict the cycles of a call, and log them at level DEBUG.

        Args:
            log_cycle_count: False, the default, predicts nothing.
        """
        self._popart.store("instrumentWithHardwareCycleCounter", log_cycle_count)

    @setter(Effect.MACHINE)
    def enableProfiling(self, profile_dir: str | None = None) -> None:
        """Write predictions of a program's memory and cycles below `profile_dir`, or ".".

        Compiling writes `profile.json` and `report.html` into a folder there. Its name is that of
        `modelName`, else "training" or "inference". POPLAR_ENGINE_OPTIONS overrides the same
        settings.

        Args:
            profile_dir: path of a folder.
        """
        wanted = {
            "debug.allowOutOfMemory": "true",
            "autoReport.directory": profile_dir or ".",
            "autoReport.all": "true",
        }
        for name, value in options_of_environment().items():
            if name in wanted:
                logger.warning(
                    "POPLAR_ENGINE_OPTIONS sets %s, which goes before enableProfiling()", name
                )
                wanted[name] = value
        self._popart.merge("engineOptions", **wanted)

    @setter(Effect.MACHINE)
    def disableModuleNamescope(self) -> None:
        """Name operators without the path of their module."""
        self._module_namescope_enabled = False

    @setter(Effect.HOST)
    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> None:
        """Say at level DEBUG, and not as a warning, that an optimizer attribute is ignored.

        Args:
            relax: False restores the warning.
        """
        self._relax_optimizer_checks = relax

    @setter(Effect.HOST)
    def showCompilationProgressBar(self, show: bool = True) -> None:
        """Show a progress bar while compiling.

        Args:
            show: True by default.
        """
        self._show_progress_bar = show

    @setter(Effect.HOST)
    def sourceLocationExcludes(self, excludes: list[str]) -> None:
        """Skip frames of these files when an operator is traced back to the user's code.

        Args:
            excludes: parts of names of files, in place of the folders of this package and PyTorch.
        """
        self._source_location_excludes = list(excludes)

    @setter(Effect.HOST)
    def appendToLocationExcludes(self, *excludes: str) -> None:
        """Skip frames of these files too.

        Args:
            excludes: parts of names of files.
        """
        self._source_location_excludes = [*self._source_location_excludes, *excludes]
