"""Hold every use that program makes of PyTorch's private names. Checked on PyTorch 2.13.0."""

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["FakeTensorMode", "OpOverload", "is_registered"]


def is_registered(operator: str, overload: str) -> bool:
    """Whether PyTorch's dispatcher knows `namespace::operator` with that overload."""
    try:
        torch._C._dispatch_find_schema_or_throw(operator, overload)
    except RuntimeError:
        return False
    return True
