"""Predict the work of an IPU: cycles of a call, and reports of memory and cycles.

A model of an IPU predicts all of it from the program. Nothing here is measured: the times of
`perf_counters.py` are this computer's, and no number mixes the two.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipu_dynamo.errors import OutOfMemory
from ipu_dynamo.memory_limit import enforce_memory
from ipu_dynamo.replace_file import replacing
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch._logging import logger
from poptorch.errors import createPoptorchError
from poptorch.hardware import ipu_generation, uses_small_ipu_model
from poptorch.options import Options
from poptorch.options.engine import ALLOW_OUT_OF_MEMORY, engine_options, switched_on

if TYPE_CHECKING:
    from ipu_dynamo.machine.prediction import Prediction
    from ipu_dynamo.machine.system import System

_MACHINE = "IPU_DYNAMO_MACHINE"
_OF_GENERATION = {1: "mk1", 2: "bow", 21: "c600"}
_SMALL_TILES = 4
# Engine options: those that ask for a report, and those for names and source lines in it
_DEBUG_INFORMATION = {"autoReport.all", "autoReport.outputDebugInfo"}
_REPORTS = {"autoReport.all", "autoReport.outputGraphProfile", "autoReport.outputExecutionProfile"}


class Predictions:
    """The part of an executor that asks a model of an IPU's memory and cycles.

    Attributes:
        _predicted: its prediction for the compiled program; None: not asked for yet.
        _counts_cycles: the options ask for the cycles of calls.
        _has_run: a call has ended since the program was compiled.
    """

    _core: CompiledModel | None
    _counts_cycles: bool
    _has_run: bool
    _options: Options
    _predicted: "Prediction | None"
    _traced: Any
    _training: bool

    def cycleCount(self) -> int:
        """Return the cycles of a call on the IPUs of replica 0, as a model of an IPU predicts them.

        They depend on the program alone. The IPUs are those of the system that IPU_DYNAMO_MACHINE
        names, else of the generation that the options or POPTORCH_IPU_MODEL_VERSION choose.

        Raises:
            poptorch.Error: without `Options.logCycleCount(True)`, and before the first call.
        """
        if not self._counts_cycles:
            raise createPoptorchError(
                "Cycle count logging is disabled. Please set option logCycleCount to True to "
                "enable.",
                id="option",
            )
        if not self._has_run:
            raise createPoptorchError(
                "Please run the model at least once before obtaining cycle count.", id="call"
            )
        return self._prediction().cycles

    def _log_cycles(self) -> None:
        """After a call, where the options ask for it."""
        if logger.isEnabledFor(logging.DEBUG):
            # the words that programs look for
            logger.debug("Total number of IPU cycles: %d", self._prediction().cycles)

    def _write_profile(self) -> None:
        """Write the prediction and its report, where the options or the environment ask for it.

        If they allow programs that do not fit into memory, only a warning says so.
        """
        on = switched_on(self._options)
        if on & _REPORTS:
            self._write_report(with_lines=bool(on & _DEBUG_INFORMATION))
        if ALLOW_OUT_OF_MEMORY in on:
            assert self._core is not None
            try:
                enforce_memory(self._core.program, None)
            except OutOfMemory as error:
                logger.warning("%s", error)

    def _write_report(self, *, with_lines: bool) -> None:
        from ipu_dynamo import write_report  # imported by who asks

        name = "training" if self._training else "inference"
        if self._options.exists("model_name"):
            name = self._options.model_name
        folder = Path(engine_options(self._options).get("autoReport.directory", "."), name)
        folder.mkdir(parents=True, exist_ok=True)
        prediction = self._prediction()
        if not with_lines:
            prediction = prediction.without_lines()
        with replacing(folder / "profile.json") as file:
            file.write(prediction.to_json())
        write_report(prediction, folder / "report.html")
        logger.info("the predicted profile is in %s", folder)

    def _prediction(self) -> "Prediction":
        if self._predicted is None:
            from ipu_dynamo.machine.predict_program import predict_program  # imported by who asks

            assert self._core is not None, "a compiled program is predicted"
            system, model = system_of_options(self._options), type(self._traced).__name__
            self._predicted = predict_program(self._core.program, system, model=model)
        return self._predicted


def system_of_options(options: Options) -> "System":
    """The system that the environment names, or IPUs of the generation that is chosen."""
    from ipu_dynamo.machine.figure import Figure  # imported by who asks
    from ipu_dynamo.machine.system import system_of  # imported by who asks

    generation = options.ipu_version if options.exists("ipu_version") else ipu_generation()
    system = system_of(os.environ.get(_MACHINE) or _OF_GENERATION.get(generation, "bow"))
    if uses_small_ipu_model():
        tiles = Figure(_SMALL_TILES, "tiles", "F", "PopTorch user guide, environment variables")
        return replace(system, ipu=replace(system.ipu, tiles=tiles))
    return system
