"""Time several ways to compute the same on one thread of this machine, and compare them fairly.

Times of several threads collapse while others use the machine, and stages with different numbers of
threads have to choose alike; so one thread is timed, by the time that it computed.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

_ROUNDS = 3  # at least
_lock = threading.Lock()
W = TypeVar("W", bound=str)


def fastest(ways: Mapping[W, Callable[[], object]], seconds: float) -> dict[W, float]:
    """The time of the fastest of several calls of each way, in seconds.

    The calls take turns, so that a busy machine slows all ways alike. One measurement at a time.

    Args:
        ways: calls without gradients.
        seconds: to spend on all of them, after one call of each.
    """
    fine = time.get_clock_info("thread_time").resolution < 1e-6
    clock = time.thread_time if fine else time.perf_counter
    spent: dict[W, list[float]] = {way: [] for way in ways}
    with _lock, torch.no_grad():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for call in ways.values():
                call()
            end, rounds = clock() + seconds, 0
            while clock() < end or rounds < _ROUNDS:
                rounds += 1
                for way, call in ways.items():
                    start = clock()
                    call()
                    spent[way].append(clock() - start)
        finally:
            torch.set_num_threads(threads)
    return {way: min(times) for way, times in spent.items()}
