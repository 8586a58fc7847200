"""Run PopTorch programs without IPU hardware."""

import os

from poptorch import _impl as _impl
from poptorch import _poplar_executor as _poplar_executor
from poptorch import _utils as _utils
from poptorch import enums, ops, optim, options, poptorch_core, profiling, testing
from poptorch import torch_ops as _torch_ops
from poptorch._distribution import __version__, refuse_foreign_distribution
from poptorch._logging import logger, setLogLevel
from poptorch.annotations import Attribute, NameScope
from poptorch.arg_parsers import (
    ICustomArgParser,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from poptorch.blocks import (
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    removeBlocks,
)
from poptorch.compile_hooks import registerPostCompileHook, registerPreCompileHook
from poptorch.cpu import CPU
from poptorch.ctc import ctc_beam_search_decoder
from poptorch.custom_ops import accessAttributes, custom_op
from poptorch.data import AsynchronousDataAccessor, DataLoader
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
from poptorch.executor.executor import PoplarExecutor
from poptorch.functions import (
    importPoptorchMetadataFromFile,
    inferenceModel,
    load,
    trainingModel,
)
from poptorch.hardware import ipuHardwareIsAvailable, ipuHardwareVersion
from poptorch.ipu_print import ipu_print_tensor
from poptorch.loops import cond, for_loop
from poptorch.multi_conv import MultiConv
from poptorch.ops import (
    identity_loss,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from poptorch.options import ConfigFileError, Options, TensorLocationSettings
from poptorch.point_clouds import fps, nearest
from poptorch.printing import module_repr, print
from poptorch.profiling import poptorchAtExit
from poptorch.slicing import dynamic_slice, dynamic_update
from poptorch.stages import BlockId, Phase, Stage
from poptorch.strategies import (
    ParallelPhasedExecution,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
)
from poptorch.tracing import getIpuTensorId, isRunningOnIpu

__all__ = [
    "CPU",
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "BlockId",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "LegacyBeginBlockFn",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
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
    "accessAttributes",
    "cond",
    "createPoptorchError",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "for_loop",
    "fps",
    "getIpuTensorId",
    "identity_loss",
    "importPoptorchMetadataFromFile",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "logger",
    "module_repr",
    "nearest",
    "nop",
    "ops",
    "optim",
    "options",
    "poptorchAtExit",
    "poptorch_core",
    "print",
    "profiling",
    "recomputationCheckpoint",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "removeBlocks",
    "serializedMatMul",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "testing",
    "trainingModel",
]

refuse_foreign_distribution()
os.environ.setdefault("RDMAV_FORK_SAFE", "1")
_torch_ops.offer()
registerGeometricCustomArgParsers()
