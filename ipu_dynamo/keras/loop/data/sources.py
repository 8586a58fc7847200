"""Take batches from one pass over a source, as many at once as an execution needs."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
from torch import Tensor

from ipu_dynamo.keras.calls.call_buffers import JoinedBatches
from ipu_dynamo.keras.loop.data.batches import Batch, normalised
from ipu_dynamo.keras.private.keras_private import ArrayReader, is_array_adapter, reads_at_once

Check = Callable[[Batch], None]


class Source(Protocol):
    """One pass over data."""

    def take(self, count: int, check: Check) -> list[Batch]:
        """The next batches, fewer where the data ends, each held to a form by `check`."""


def source_of(adapter: Any) -> Source:
    """A new pass over the data of an adapter of Keras."""
    loader = adapter.get_torch_dataloader()
    if reads_at_once(adapter):
        return ArraySource(ArrayReader(loader))
    # batches of arrays are fresh memory
    return LoadedSource(iter(loader), copy=not is_array_adapter(adapter))


class LoadedSource:
    """The items of an iterator, batch by batch.

    Args:
        copy: the iterator may write into a batch's memory again.
    """

    def __init__(self, batches: Iterator[Any], *, copy: bool) -> None:
        self._batches, self._copy = batches, copy

    def take(self, count: int, check: Check) -> list[Batch]:
        """As `Source` says."""
        taken: list[Batch] = []
        while len(taken) < count:
            try:
                data = next(self._batches)
            except StopIteration:
                break
            batch = normalised(data, copy=self._copy)
            check(batch)
            taken.append(batch)
        return taken


class ArraySource:
    """Rows of arrays: those of an execution are read as one, and the batches are views of it."""

    def __init__(self, reader: ArrayReader) -> None:
        self._reader = reader

    def take(self, count: int, check: Check) -> list[Batch]:
        """As `Source` says."""
        rows, data = self._reader.next(count)
        if not rows:
            return []
        whole = normalised(data, copy=False)
        batches = _views(whole, rows)
        if len(set(rows)) > 1:
            for batch in batches:
                check(batch)
            return batches
        check(batches[0])  # of one array all have one form
        return JoinedBatches(batches, whole)


def _views(whole: Batch, rows: list[int]) -> list[Batch]:
    """The batches that were read as one, with so many rows each."""
    plain = all(part is None or isinstance(part, Tensor) for part in whole)
    leaves = whole if plain else keras.tree.flatten(whole)
    none = [None] * len(rows)
    columns = [none if leaf is None else leaf.split(rows) for leaf in leaves]
    flat = zip(*columns, strict=True)
    if plain:
        return list(flat)
    return [keras.tree.pack_sequence_as(whole, list(batch)) for batch in flat]
