"""Carry 64-bit integers in 32 bits, and refuse those that do not fit."""

import torch
from torch import Tensor

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("to_int32(Tensor x, str what) -> Tensor")
_LIMITS = torch.iinfo(torch.int32)


def _to_int32(x: Tensor, what: str) -> Tensor:
    """`x` in 32 bits.

    Raises:
        ValueError: a value does not fit; `what` says whose it is.
    """
    if x.numel():
        low, high = (int(limit) for limit in torch.aminmax(x.detach()))
        if low < _LIMITS.min or high > _LIMITS.max:
            wrong = low if low < _LIMITS.min else high
            raise ValueError(f"{what} has the value {wrong}, which does not go into int32")
    return x.to(torch.int32, copy=True)


def _shape(x: Tensor, what: str) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int32)


_library.impl("to_int32", _to_int32, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::to_int32", _shape, lib=_library)
to_int32 = torch.ops.ipu.to_int32.default
