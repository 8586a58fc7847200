"""Hold every use that program makes of PyTorch's private names. Checked on PyTorch 2.13.0."""

from contextlib import AbstractContextManager

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.utils import _pytree as pytree

__all__ = [
    "FakeTensorMode",
    "OpOverload",
    "code_on_demand",
    "is_registered",
    "module_of",
    "pytree",
    "with_device",
]


def module_of(graph: fx.Graph, attributes: torch.nn.Module | None = None) -> fx.GraphModule:
    """A module that runs `graph`, with those of the `attributes` that it reads.

    Its Python is written when somebody asks for it: most stages are run without, and it takes as
    long as many a pass.
    """
    return _LazyGraphModule(attributes or torch.nn.Module(), graph)


def code_on_demand() -> AbstractContextManager[None]:
    """Let tracing make modules like `module_of`."""
    return _use_lazy_graph_module(True)


def with_device(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor like `meta`, on `device`; six times as fast as to make it under the mode."""
    return FakeTensor(mode, meta, device)


def is_registered(operator: str, overload: str) -> bool:
    """Whether PyTorch's dispatcher knows `namespace::operator` with that overload."""
    try:
        torch._C._dispatch_find_schema_or_throw(operator, overload)
    except RuntimeError:
        return False
    return True
