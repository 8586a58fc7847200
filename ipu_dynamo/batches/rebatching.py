"""Cut a sequence of batches into items of one size."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.errors import BatchError


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """The rows of a batch that go into one item.

    Args:
        batch: a structure of tensors.
        leaves: its tensors.
        rows: those that go into the item; None: the batch is the item.
        start: the first of these rows in the item.
        completes: whether they fill the item.
    """

    batch: Any
    leaves: list[Tensor]
    rows: slice | None
    start: int
    completes: bool

    @property
    def tensors(self) -> list[Tensor]:
        """The rows, as views of the batch."""
        return self.leaves if self.rows is None else [leaf[self.rows] for leaf in self.leaves]


def batch_slices(
    batches: Iterable[Any], size: int | None, tensors_of: Callable[[Any], Iterable[Tensor]]
) -> Iterator[BatchSlice]:
    """The slices of all items, in order.

    The last item may get too few rows; then no slice completes it.

    Args:
        batches: structures of tensors.
        size: rows of an item; None: each batch is an item.
        tensors_of: lists the tensors of a structure.

    Raises:
        BatchError: a tensor is not a dense one of the CPU, or a batch cannot be cut into rows.
    """
    start = 0
    for batch in batches:
        leaves = list(tensors_of(batch))
        _check(leaves)
        if size is None:
            yield BatchSlice(batch, leaves, None, 0, completes=True)
            continue
        rows, done = _rows(leaves), 0
        while done < rows:
            stop = min(rows, done + size - start)
            end = start + stop - done
            yield BatchSlice(batch, leaves, slice(done, stop), start, completes=end == size)
            start, done = end % size, stop


def _check(leaves: list[Tensor]) -> None:
    for leaf in leaves:
        if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            raise BatchError(
                f"items must be made of dense tensors of the CPU, got one of {leaf.device} with "
                f"layout {leaf.layout}"
            )


def _rows(leaves: list[Tensor]) -> int:
    """The first dimension, which all tensors share."""
    if not leaves or not all(leaf.dim() for leaf in leaves):
        raise BatchError("a batch without rows cannot be cut")
    sizes = sorted({len(leaf) for leaf in leaves})
    if len(sizes) > 1:
        raise BatchError(
            f"the tensors of a batch must have the same first dimension to be cut, got {sizes}"
        )
    return sizes[0]
