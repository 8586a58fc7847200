"""Time contenders for the same work side by side, so that a busy machine slows all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """What one contender took, in seconds.

    Args:
        first: its first call, with compilation.
        median: the median of the later calls.
        fastest: the fastest of them.
        calls: how many later calls were timed.
    """

    first: float
    median: float
    fastest: float
    calls: int


def side_by_side(contenders: Mapping[str, Step], *, seconds: float) -> dict[str, Timing]:
    """Call the contenders in turn, for about `seconds` in all and at least 5 rounds.

    A round calls each contender in a burst that takes about 10 ms, which counts as one timing.
    """
    first = {name: _time(step, 1) for name, step in contenders.items()}
    bursts = {name: max(1, round(0.01 / _time(step, 3))) for name, step in contenders.items()}
    timings: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(timings.values()))) < 5:
        for name, step in contenders.items():
            timings[name].append(_time(step, bursts[name]))
    return {
        name: Timing(first[name], statistics.median(spent), min(spent), len(spent) * bursts[name])
        for name, spent in timings.items()
    }


def _time(step: Step, calls: int) -> float:
    """Seconds per call of `step`, over `calls` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls
