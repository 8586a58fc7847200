"""Time epochs of asynchronous loaders beside the slower of making items and computing on them.

Both sides take equally long for an item, one core each: the hardest case to overlap.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import poptorch
from benchmarks.measure import clock
from poptorch import DataLoaderMode, SharingStrategy

SAMPLES = 4  # of an item
STARTS = {"spawn": SharingStrategy.SharedMemory, "fork": SharingStrategy.Fork}
MODES = (DataLoaderMode.Async, DataLoaderMode.AsyncRebatched)


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one epoch, on both sides.

    Args:
        nbytes: of an item.
        items: of an epoch.
        seconds: that each side takes for an item.
    """

    nbytes: int
    items: int
    seconds: float


LOADS = {"4 kB": Load(4 << 10, 400, 0.004), "16 MB": Load(16 << 20, 30, 0.08)}


class Samples(Dataset[Tensor]):
    """Samples that NumPy makes on one core.

    Args:
        load: the items that they become.
        passes: how often the numbers are drawn, for them to take long enough.
    """

    def __init__(self, load: Load, passes: int) -> None:
        self._numbers = load.nbytes // SAMPLES // 4
        self._length, self._passes = load.items * SAMPLES, passes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        drawn = np.random.default_rng(index)
        for _ in range(self._passes):
            sample = drawn.random(self._numbers, dtype=np.float32)
        return torch.from_numpy(sample)


def epochs() -> dict[str, float]:
    """The time of an epoch by that of its slower side alone, for sizes, workers, modes, starts."""
    torch.set_num_threads(1)
    found = {}
    for (size, load), workers in product(LOADS.items(), (1, 2)):
        step, data = step_of(load), samples_of(load)
        alone = max(_epoch(_loader(data, workers), None), load.items * _seconds(step))
        for mode, (start, strategy) in product(MODES, STARTS.items()):
            name = f"{size}, {workers} workers, {mode.name}, {start}: epoch by its slower side"
            found[name] = with_step(data, workers, mode, strategy, step) / alone
    return found


def with_step(
    data: Samples,
    workers: int,
    mode: DataLoaderMode,
    strategy: SharingStrategy,
    step: Callable[[], object],
) -> float:
    """Seconds of an epoch with a step after each item; no item is made before."""
    loader = _loader(
        data,
        workers,
        mode=mode,
        rebatched_worker_size=SAMPLES - 1,  # so that rebatching has something to cut
        async_options={"sharing_strategy": strategy, "load_indefinitely": False},
    )
    seconds = _epoch(loader, step)
    loader.terminate()
    return seconds


def samples_of(load: Load) -> Samples:
    """Samples of which an item takes as long as `load` says."""
    data = Samples(load, 1)
    once = _seconds(lambda: [data[index] for index in range(SAMPLES)])
    return Samples(load, max(1, round(load.seconds / once)))


def step_of(load: Load) -> Callable[[], object]:
    """A computation on one core that takes as long as `load` says."""
    a = torch.rand(96, 96)
    once = _seconds(lambda: a @ a)
    products = max(1, round(load.seconds / once))
    return lambda: [a @ a for _ in range(products)]


def _loader(data: Samples, workers: int, **settings: Any) -> poptorch.DataLoader:
    return poptorch.DataLoader(poptorch.Options(), data, SAMPLES, num_workers=workers, **settings)


def _epoch(items: Iterable[Tensor], step: Callable[[], object] | None) -> float:
    """Seconds of the second epoch: processes start in the first."""
    for _ in items:
        pass
    start = time.perf_counter()
    for item in items:
        item[0, 0].item()
        if step is not None:
            step()
    return time.perf_counter() - start


def _seconds(call: Callable[[], object]) -> float:
    """The median time of a call."""
    return statistics.median(clock(call)(1) for _ in range(9))
