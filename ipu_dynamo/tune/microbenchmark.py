"""Time several ways to compute the same, on one thread, and compare them fairly.

One thread is timed, by its processor time, for two reasons. Times of several threads vary widely
while other programs run. And stages with different numbers of threads have to choose alike.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch

from ipu_dynamo.ops.private.locks import fork_safe_lock
from ipu_dynamo.tune.intra_op import intra_op_threads

_ROUNDS = 3  # at least
_lock = fork_safe_lock()
W = TypeVar("W", bound=str)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, without gradients or autocast, while no other measurement runs."""
    with _lock, torch.no_grad(), torch.autocast("cpu", enabled=False), intra_op_threads(1):
        yield


def shortest_times(ways: Mapping[W, Callable[[], object]], seconds: float) -> dict[W, float]:
    """The time of the fastest of several calls of each way, in seconds; within `one_thread`.

    The calls take turns, so that a busy machine slows all ways alike.

    Args:
        seconds: to spend on all of them, after one call of each.
    """
    fine = time.get_clock_info("thread_time").resolution < 1e-6
    clock = time.thread_time if fine else time.perf_counter
    spent: dict[W, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        call()
    end, rounds = clock() + seconds, 0
    while clock() < end or rounds < _ROUNDS:
        rounds += 1
        for way, call in ways.items():
            start = clock()
            call()
            spent[way].append(clock() - start)
    return {way: min(times) for way, times in spent.items()}
