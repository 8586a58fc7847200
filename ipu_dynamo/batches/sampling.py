"""Choose the samples of each item of a data loader, and the process that loads them."""

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import Dataset, Sampler


class ProcessSampler(Sampler[int]):
    """Indices of the samples that one of several processes loads.

    Without `drop_last` each sample is loaded by one process. With it, all processes load the same
    number of whole items, and some samples are left over. When shuffling, these alternate from
    epoch to epoch, so that two epochs load all samples if one epoch loads at least half.

    Invariant: all processes draw the same permutations, because they share seed and epoch.

    Args:
        length: samples of the whole data set.
        item_size: samples per item of one process.
        process, processes: this process, and how many there are.
        drop_last: leave out samples that do not fill an item in each process.
        seed: of the permutations; None keeps the samples in order.
    """

    def __init__(
        self,
        length: int,
        item_size: int,
        *,
        process: int,
        processes: int,
        drop_last: bool,
        seed: int | None,
    ) -> None:
        self._length = length
        if drop_last:
            self._size = item_size * (length // (item_size * processes))
            self._start = process * self._size
            self._left_over = length - self._size * processes
        else:
            each, more = divmod(length, processes)
            self._size = each + (process < more)
            self._start = process * each + min(process, more)
            self._left_over = 0
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._skip_first = False
        self._missed: set[int] = set()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        if self._generator is None:
            return iter(range(self._start, self._start + self._size))
        order: list[int] = torch.randperm(self._length, generator=self._generator).tolist()
        if self._skip_first:
            self._swap_in_missed(order)
            start = self._start + self._left_over
        else:
            self._missed = set(order[self._length - self._left_over :])
            start = self._start
        self._skip_first = not self._skip_first
        return iter(order[start : start + self._size])

    def _swap_in_missed(self, order: list[int]) -> None:
        """Swap skipped samples that the last epoch left out, too, with samples that it loaded."""
        loaded = (
            index
            for index in range(self._left_over, self._length)
            if order[index] not in self._missed
        )
        missed = (index for index in range(self._left_over) if order[index] in self._missed)
        for index, other in zip(missed, loaded, strict=False):  # a small data set has few of these
            order[index], order[other] = order[other], order[index]


class GroupedBatches(Sampler[list[Any]]):
    """Lists of several consecutive batches of another sampler.

    Args:
        batches: the other sampler.
        group: batches of a list.
        drop_last: leave out a shorter last group.
    """

    def __init__(self, batches: Iterable[Any], group: int, *, drop_last: bool) -> None:
        self._batches, self._group, self._drop_last = batches, group, drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(cast(Sized, self._batches)), self._group)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        group: list[Any] = []
        for batch in self._batches:
            group.append(batch)
            if len(group) == self._group:
                yield group
                group = []
        if group and not self._drop_last:
            yield group


class Batches(Dataset[Any]):
    """A data set whose samples are collated batches of another data set's samples.

    It has the attributes of the other data set.

    Args:
        samples: the other data set.
        collate: makes a batch of a list of samples.
    """

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._samples, self._collate = samples, collate

    def __getitem__(self, indices: Iterable[Any]) -> Any:
        if hasattr(self._samples, "__getitems__"):
            return self._collate(self._samples.__getitems__(indices))
        return self._collate([self._samples[index] for index in indices])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_samples":
            raise AttributeError(name)
        return getattr(self._samples, name)
