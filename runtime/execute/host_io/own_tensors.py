"""Make memory for what the steps of a call send."""

from collections.abc import Sequence

import torch
from torch import Tensor


def own_tensors(like: Tensor, kept: Sequence[bool]) -> list[Tensor]:
    """A tensor for every step: those that are kept have memory of their own."""
    count, shape = sum(kept), like.shape
    if count > 1 and like.is_contiguous():
        own = iter(torch.empty((count, *shape), dtype=like.dtype, device="cpu").unbind(0))
    else:
        own = iter([_empty(like) for _ in range(count)])
    dropped = _empty(like) if count < len(kept) else None
    return [next(own) if keep else dropped for keep in kept]  # type: ignore[misc]


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
