"""Set the options of an executor or a data loader."""

from typing import TYPE_CHECKING, Any

from poptorch.options.adopt import adopt, given_options, mean_reduction_strategy, uses_ipu_model
from poptorch.options.distributed import _DistributedOptions
from poptorch.options.effects import Effect
from poptorch.options.general import Options
from poptorch.options.jit import _JitOptions
from poptorch.options.locations import TensorLocationSettings, _TensorLocationOptions
from poptorch.options.popart import _PopartOptions
from poptorch.options.precision import _PrecisionOptions
from poptorch.options.session import check_session
from poptorch.options.table import OptionEffect, table
from poptorch.options.text import ConfigFileError
from poptorch.options.training import _TrainingOptions
from poptorch.stages import BlockId, Phase, Stage
from poptorch.strategies import ExecutionStrategy as _IExecutionStrategy  # PopTorch's name
from poptorch.strategies import (
    ParallelPhasedExecution,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
)

if TYPE_CHECKING:
    from poptorch.annotations import Attribute

__all__ = [
    "Attribute",
    "BlockId",
    "ConfigFileError",
    "Effect",
    "OptionEffect",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
    "_DistributedOptions",
    "_IExecutionStrategy",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
    "adopt",
    "check_session",
    "given_options",
    "mean_reduction_strategy",
    "table",
    "uses_ipu_model",
]


def __getattr__(name: str) -> Any:
    if name == "Attribute":  # its module loads what traces, which processes that load data spare
        from poptorch.annotations import Attribute

        return Attribute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
