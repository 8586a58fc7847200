"""Set the options of an executor or a data loader."""

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
from poptorch.strategies import ExecutionStrategy as _IExecutionStrategy  # PopTorch's name

__all__ = [
    "ConfigFileError",
    "Effect",
    "OptionEffect",
    "Options",
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
