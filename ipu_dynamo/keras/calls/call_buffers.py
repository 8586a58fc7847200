"""Put the batches of a call together, into memory that is used again."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from keras import tree
from keras.utils import unpack_x_y_sample_weight
from torch import Tensor


class JoinedBatches(list[Any]):
    """The batches of a call, one after the other in memory.

    Args:
        batches: in order, each `(x, y, sample_weight)`.
        whole: all of them as one.
    """

    def __init__(self, batches: Iterable[Any], whole: Any) -> None:
        super().__init__(batches)
        self.whole = whole


class CallBuffers:
    """The inputs of one program.

    Args:
        batch: the first one, `(x, y, sample_weight)` with nested tensors; None where there are
            none.
        count: batches of each call.
    """

    def __init__(self, batch: Any, count: int) -> None:
        self._structure = tree.map_structure(lambda leaf: None, batch)
        self._count = count
        self._buffers = [
            None
            if tensor is None
            else tensor.new_empty((count * tensor.shape[0], *tensor.shape[1:]))
            for tensor in leaves(batch)
        ]

    def filled(self, batches: Sequence[Any]) -> Any:
        """The batches of a call as one, in order."""
        if isinstance(batches, JoinedBatches):
            return self._packed(leaves(batches.whole))
        normal = [unpack_x_y_sample_weight(batch) for batch in batches]
        if self._count == 1:
            return self._packed(leaves(normal[0]))
        columns = zip(*map(leaves, normal), strict=True)
        for buffer, column in zip(self._buffers, columns, strict=True):
            if buffer is not None:
                torch.cat(column, out=buffer)
        return self._packed(self._buffers)

    def _packed(self, tensors: Sequence[Tensor | None]) -> Any:
        return tree.pack_sequence_as(self._structure, list(tensors))


def leaves(batch: Any) -> list[Tensor | None]:
    """The tensors of a batch in the order of its structure, in types that a program carries."""
    plain = all(leaf is None or isinstance(leaf, Tensor) for leaf in batch)
    flat = batch if plain else tree.flatten(batch)  # most are plain, and this is every batch's
    return [None if leaf is None else _carried(leaf) for leaf in flat]


def _carried(leaf: Any) -> Tensor:
    tensor = leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf)
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.float() if tensor.dtype == torch.float64 else tensor
