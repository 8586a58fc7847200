"""Offer what libraries for PopTorch reach through `poptorch._utils`."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def combine_batch_tensors_gen(tensors: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Concatenate the tensors of several batches along dim 0, position by position.

    Args:
        tensors: those of each batch, in the same order.
    """
    for parts in zip(*tensors, strict=True):
        yield torch.cat(parts)


__all__ = ["combine_batch_tensors_gen"]
