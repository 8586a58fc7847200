"""Run PopTorch programs without IPU hardware."""

import os

from poptorch import enums, optim, options, poptorch_core
from poptorch._distribution import __version__, refuse_foreign_distribution

from poptorch._logging import logger, setLogLevel
from poptorch.arg_parsers import (
    ICustomArgParser,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from poptorch.dataloader import DataLoader
from poptorch.enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from poptorch.errors import Error, RecoverableError, UnrecoverableError, createPoptorchError
from poptorch.hardware import ipuHardwareIsAvailable, ipuHardwareVersion
from poptorch.options import ConfigFileError, Options, TensorLocationSettings
from poptorch.stages import BlockId, Phase, Stage
from poptorch.strategies import (
    ParallelPhasedExecution,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
)

__all__ = [
    "AutoStage",
    "BlockId",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "__version__",
    "createPoptorchError",
    "enums",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "logger",
    "optim",
    "options",
    "poptorch_core",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "setLogLevel",
]

refuse_foreign_distribution()
os.environ.setdefault("RDMAV_FORK_SAFE", "1")
registerGeometricCustomArgParsers()
