"""Place tensors one after the other in memory, so that an operator takes them as one vector."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ipu_dynamo.tune.costs import (
    CALLING_A_TRACED_FUNCTION,
    COPIES_INTO_A_ROW,
    UPDATE_BYTES_PER_SECOND,
)


def gains_in_a_row(parameter: Tensor) -> bool:
    """Whether copying a parameter into a row, and back, takes less time than a separate call."""
    copied = COPIES_INTO_A_ROW * parameter.nbytes
    return copied < CALLING_A_TRACED_FUNCTION * UPDATE_BYTES_PER_SECOND


def zeros_in_a_row(likes: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return zeros in the shapes of some tensors on one device, dense and one after the other.

    Each is a tensor of its own and no view: torch counts the writes into each separately.
    """
    device = likes[0].device
    row = torch.zeros(sum(like.numel() for like in likes), dtype=dtype, device=device)
    tensors, place = [], 0
    for like in likes:
        strides = torch.empty(like.shape, device="meta").stride()
        empty = torch.empty(0, dtype=dtype, device=device)
        tensors.append(empty.set_(row.untyped_storage(), place, like.shape, strides))
        place += like.numel()
    return tensors


def row_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the vector of all tensors, if they are one after the other in this order."""
    first = tensors[0]
    memory, place = first.untyped_storage(), first.storage_offset()
    for tensor in tensors:
        beside = tensor.untyped_storage().data_ptr() == memory.data_ptr()
        beside = beside and tensor.storage_offset() == place and tensor.dtype == first.dtype
        if not (beside and tensor.is_contiguous()):
            return None
        place += tensor.numel()
    count = place - first.storage_offset()
    empty = torch.empty(0, dtype=first.dtype, device=first.device)
    return empty.set_(memory, first.storage_offset(), (count,), (1,))
