"""Run PopTorch programs without IPU hardware.

The part that compiles and runs models is loaded when the first of its names is used. Loading takes
seconds, and a process that only loads data never needs it. It is loaded as a whole, so nothing is
imported while a model is traced.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from poptorch import _utils as _utils
from poptorch import enums, optim, options, profiling, testing
from poptorch import torch_ops as _torch_ops
from poptorch._distribution import __version__, refuse_foreign_distribution
from poptorch._logging import logger, setLogLevel
from poptorch.arg_parsers import (
    ICustomArgParser,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from poptorch.compile_hooks import registerPostCompileHook, registerPreCompileHook
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
from poptorch.hardware import ipuHardwareIsAvailable, ipuHardwareVersion
from poptorch.options import ConfigFileError, Options, TensorLocationSettings
from poptorch.options.text import NAMES as _NAMES
from poptorch.printing import module_repr, print
from poptorch.profiling import poptorchAtExit
from poptorch.stages import BlockId, Phase, Stage
from poptorch.strategies import (
    ParallelPhasedExecution,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
)

if TYPE_CHECKING:
    from poptorch import _impl as _impl
    from poptorch import _poplar_executor as _poplar_executor
    from poptorch import ops, poptorch_core
    from poptorch.annotations import Attribute, NameScope
    from poptorch.blocks import (
        BeginBlock,
        Block,
        BlockFunction,
        LegacyBeginBlockFn,
        removeBlocks,
    )
    from poptorch.cpu import CPU
    from poptorch.ctc import ctc_beam_search_decoder
    from poptorch.custom_ops import accessAttributes, custom_op
    from poptorch.executor.executor import PoplarExecutor
    from poptorch.functions import (
        importPoptorchMetadataFromFile,
        inferenceModel,
        load,
        trainingModel,
    )
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
    from poptorch.point_clouds import fps, nearest
    from poptorch.slicing import dynamic_slice, dynamic_update
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

_MODULES_ON_FIRST_USE = ("_impl", "_poplar_executor", "ops", "poptorch_core")
_NAMES_ON_FIRST_USE = {
    "annotations": ("Attribute", "NameScope"),
    "blocks": ("BeginBlock", "Block", "BlockFunction", "LegacyBeginBlockFn", "removeBlocks"),
    "cpu": ("CPU",),
    "ctc": ("ctc_beam_search_decoder",),
    "custom_ops": ("accessAttributes", "custom_op"),
    "executor.executor": ("PoplarExecutor",),
    "functions": (
        "importPoptorchMetadataFromFile",
        "inferenceModel",
        "load",
        "trainingModel",
    ),
    "ipu_print": ("ipu_print_tensor",),
    "loops": ("cond", "for_loop"),
    "multi_conv": ("MultiConv",),
    "ops": (
        "identity_loss",
        "nop",
        "recomputationCheckpoint",
        "serializedMatMul",
        "set_available_memory",
        "set_overlap_for_input",
        "set_overlap_for_output",
    ),
    "point_clouds": ("fps", "nearest"),
    "slicing": ("dynamic_slice", "dynamic_update"),
    "tracing": ("getIpuTensorId", "isRunningOnIpu"),
}
_ON_FIRST_USE = {
    *_MODULES_ON_FIRST_USE,
    *(name for names in _NAMES_ON_FIRST_USE.values() for name in names),
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    known = globals()
    for module in _MODULES_ON_FIRST_USE:
        known.setdefault(module, import_module(f"{__name__}.{module}"))
    for module_name, names in _NAMES_ON_FIRST_USE.items():
        module_of_names = import_module(f"{__name__}.{module_name}")
        for each in names:
            known.setdefault(each, getattr(module_of_names, each))  # unless a program has set it
    return known[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


refuse_foreign_distribution()
os.environ.setdefault("RDMAV_FORK_SAFE", "1")
_NAMES[__name__] = sys.modules[__name__]
_torch_ops.offer()
registerGeometricCustomArgParsers()
