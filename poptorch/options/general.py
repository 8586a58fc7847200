"""Put the options of one executor or data loader together."""

import copy
import os
from typing import Any, Self

from poptorch._logging import logger
from poptorch.enums import CommGroupType, ConnectionType, OutputMode, SyncPattern
from poptorch.errors import require
from poptorch.options.batching import BatchingOptions
from poptorch.options.distributed import _DistributedOptions
from poptorch.options.effects import Effect, setter
from poptorch.options.host import HostOptions, default_location_excludes
from poptorch.options.jit import _JitOptions
from poptorch.options.locations import _TensorLocationOptions
from poptorch.options.machine import MachineOptions
from poptorch.options.popart import _PopartOptions
from poptorch.options.precision import _PrecisionOptions
from poptorch.options.text import apply_file, apply_json
from poptorch.options.training import _TrainingOptions
from poptorch.strategies import PipelinedExecution


class Options(BatchingOptions, MachineOptions, HostOptions):
    """The options of an executor or a data loader.

    Every setter returns the object it was called on. Using options freezes them: `clone()` gives
    a copy that can be changed.
    """

    _training: _TrainingOptions
    _precision: _PrecisionOptions
    _distributed: _DistributedOptions
    _tensor_locations: _TensorLocationOptions
    _jit: _JitOptions

    def __init__(self) -> None:
        super().__init__(
            anchored_tensors={},
            auto_round_num_ipus=False,
            available_memory_proportion={},
            broadcast_buffers=True,
            connection_type=ConnectionType.Always.value,
            device_iterations=1,
            input_cgt=CommGroupType.Consecutive,
            input_group_size=1,
            log_dir=".",
            max_repeat_logs=4,
            output_mode=OutputMode.Default.value,
            output_return_period=1,
            replication_factor=1,
            sync_pattern=SyncPattern.Full.value,
        )
        popart = _PopartOptions()
        self._declare_private(
            _popart=popart,
            _training=_TrainingOptions(popart),
            _precision=_PrecisionOptions(popart),
            _distributed=_DistributedOptions(),
            _tensor_locations=_TensorLocationOptions(),
            _jit=_JitOptions(),
            _execution_strategy=PipelinedExecution(),
            _source_location_excludes=default_location_excludes(),
            _relax_optimizer_checks=False,
            _show_progress_bar=True,
            _module_namescope_enabled=True,
            _device_of_tensors="ipu",
        )
        if path := os.environ.get("POPTORCH_CACHE_DIR"):
            logger.info("POPTORCH_CACHE_DIR is set to %s", path)
            self.enableExecutableCaching(path)
        self.from_json(os.environ.get("POPTORCH_DEFAULT_OPTIONS") or "{}")

    @property
    def Training(self) -> _TrainingOptions:
        """Options of training."""
        return self._training

    @property
    def Precision(self) -> _PrecisionOptions:
        """Options of rounding."""
        return self._precision

    @property
    def Distributed(self) -> _DistributedOptions:
        """Options of a process that works together with others."""
        return self._distributed

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """Options of where tensors live."""
        return self._tensor_locations

    @property
    def Jit(self) -> _JitOptions:
        """Options of tracing."""
        return self._jit

    @property
    def _Popart(self) -> _PopartOptions:
        """Settings of the lower layers."""
        return self._popart

    @setter(Effect.HOST)
    def loadFromFile(self, filepath: str) -> None:
        """Make the calls that a trusted file lists, in addition to earlier settings.

        Args:
            filepath: text with one call a line, such as `deviceIterations(4)`.
        """
        apply_file(self, filepath)

    @setter(Effect.HOST)
    def from_json(self, string: str) -> None:
        """Call the setters that a JSON object names, such as {"deviceIterations": 2}.

        Args:
            string: the object as text; a list has the arguments of one call.
        """
        apply_json(self, string)

    def clone(self) -> Self:
        """An independent copy that is not frozen."""
        return copy.deepcopy(self)

    def toDict(self) -> dict[str, Any]:
        """All values in one dictionary, but those of Jit and Precision."""
        require(not self.defaultOutputMode(), "An output mode must be chosen before toDict()")
        values = {**self._execution_strategy.backendOptions(), **self._popart.options}
        for part in (self, self._training, self._distributed, self._tensor_locations):
            values = part.update(values)
        return values

    def _parts(self) -> dict[str, Any]:
        return {
            "Training": self._training,
            "Precision": self._precision,
            "Distributed": self._distributed,
            "TensorLocations": self._tensor_locations,
            "Jit": self._jit,
            "_Popart": self._popart,
        }
