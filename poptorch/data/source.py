"""Say what an asynchronous accessor makes its items of, and how many an epoch has."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from poptorch.data.torch_private import without_workers
from poptorch.errors import require


@dataclass(frozen=True, slots=True)
class Source:
    """What is iterated in the other process.

    Args:
        data: gives the batches of an epoch each time that it is iterated or read.
        length: how many items they make.
        keep_rest: whether the last item may have fewer rows.
    """

    data: Any
    length: Callable[[], int]
    keep_rest: bool = False


def items(samples: int, size: int, *, keep_rest: bool) -> int:
    """How many items of `size` samples are made."""
    whole, rest = divmod(samples, size)
    return whole + (rest > 0 and keep_rest)


def source_of(dataset: Any, rebatched_size: int | None) -> Source:
    """What to make of a data set or loader that a user passes."""
    if hasattr(type(dataset), "_source"):  # a loader of this package
        source: Source = dataset._source(rebatched_size)
        return source
    data = dataset
    if isinstance(dataset, DataLoader):
        require(
            rebatched_size is None or dataset.batch_size in (1, None),
            f"rebatched_size needs a loader of batch size 1, got {dataset.batch_size}",
        )
        data = without_workers(dataset)
    if rebatched_size is None:
        return Source(data, lambda: len(dataset))
    return Source(data, lambda: items(len(dataset), rebatched_size, keep_rest=False))
