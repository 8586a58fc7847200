"""Cut a sequence of batches anew, into items of one size."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poptorch.arg_parsers import tensors_of
from poptorch.errors import require


@dataclass(frozen=True, slots=True)
class Piece:
    """What a batch gives to an item.

    Args:
        batch: a structure of tensors.
        leaves: its tensors, in the order of `tensors_of`.
        rows: those that go into the item; None: the batch is the item.
        start: where they come to lie in the item.
        completes: whether the item has all its rows with them.
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


def pieces(batches: Iterable[Any], size: int | None) -> Iterator[Piece]:
    """The pieces of all items, in order.

    The rows of the last item may be too few; then no piece completes it.

    Args:
        batches: structures of tensors.
        size: rows of an item; None: each batch is an item.
    """
    start = 0
    for batch in batches:
        leaves = _leaves(batch)
        if size is None:
            yield Piece(batch, leaves, None, 0, completes=True)
            continue
        rows, done = _rows(leaves), 0
        while done < rows:
            stop = min(rows, done + size - start)
            end = start + stop - done
            yield Piece(batch, leaves, slice(done, stop), start, completes=end == size)
            start, done = end % size, stop


def _leaves(batch: Any) -> list[Tensor]:
    leaves = list(tensors_of(batch))
    for leaf in leaves:
        require(
            isinstance(leaf, Tensor),
            f"items must be made of tensors, got a {type(leaf).__name__}: convert it in "
            "collate_fn, or register a parser of its class with poptorch.registerCustomArgParser",
        )
        require(
            leaf.device.type == "cpu" and leaf.layout is torch.strided,
            f"items must be made of dense tensors of the CPU, got one of {leaf.device} with layout "
            f"{leaf.layout}",
        )
    return leaves


def _rows(leaves: list[Tensor]) -> int:
    """The first dimension, which all tensors share."""
    require(leaves and all(leaf.dim() for leaf in leaves), "a batch without rows cannot be cut")
    sizes = sorted({len(leaf) for leaf in leaves})
    require(
        len(sizes) == 1,
        f"the tensors of a batch must have the same first dimension to be cut, got {sizes}",
    )
    return sizes[0]
