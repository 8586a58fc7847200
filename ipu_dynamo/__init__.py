"""Run PyTorch programs for IPUs anywhere: one compiler, one runtime, `torch.compile` and PopTorch.

Names are loaded on first use, since every import of a submodule runs this file.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipu_dynamo.blocks import BeginBlock, Block, BlockFunction
    from ipu_dynamo.capture.markers import identity_loss
    from ipu_dynamo.compiled import CompiledModel, compile_inference, compile_training
    from ipu_dynamo.errors import CompileError, ExecutionError, InputError, IpuError
    from ipu_dynamo.options import Options, StageSpec, Strategy
    from ipu_dynamo.program.replica_groups import ReplicaGroups
    from ipu_dynamo.recent import programs

__version__ = "0.1.0"
__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CompileError",
    "CompiledModel",
    "ExecutionError",
    "InputError",
    "IpuError",
    "Options",
    "ReplicaGroups",
    "StageSpec",
    "Strategy",
    "compile_inference",
    "compile_training",
    "identity_loss",
    "programs",
]

_HOMES = {
    "ipu_dynamo.blocks": ("BeginBlock", "Block", "BlockFunction"),
    "ipu_dynamo.capture.markers": ("identity_loss",),
    "ipu_dynamo.compiled": ("CompiledModel", "compile_inference", "compile_training"),
    "ipu_dynamo.errors": ("CompileError", "ExecutionError", "InputError", "IpuError"),
    "ipu_dynamo.options": ("Options", "StageSpec", "Strategy"),
    "ipu_dynamo.program.replica_groups": ("ReplicaGroups",),
    "ipu_dynamo.recent": ("programs",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
