"""Time contenders for the same work in turn, so that a busy machine slows all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Step = Callable[[], object]
Maker = Callable[[], Step]
Clock = Callable[[int], float]  # seconds per call, over so many calls


@dataclass(frozen=True, slots=True)
class Timing:
    """What one contender took, in seconds.

    Args:
        first: its first call, with compilation.
        median: the median of the later calls.
        fastest: the fastest of them.
        calls: how many later calls were timed.
        ratio: the median over the rounds of its time beside the last contender's.
    """

    first: float
    median: float
    fastest: float
    calls: int
    ratio: float


def side_by_side(contenders: Mapping[str, Clock], *, seconds: float) -> dict[str, Timing]:
    """Call the contenders in turn, for about `seconds` in all and at least 5 rounds.

    A round calls each contender in a burst that takes about 10 ms, which counts as one timing.
    """
    first = {name: clock(1) for name, clock in contenders.items()}
    bursts = {name: max(1, round(0.01 / clock(3))) for name, clock in contenders.items()}
    timings: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(timings.values()))) < 5:
        for name, clock in contenders.items():
            timings[name].append(clock(bursts[name]))
    last = list(timings.values())[-1]
    return {
        name: Timing(
            first[name],
            statistics.median(spent),
            min(spent),
            len(spent) * bursts[name],
            statistics.median(a / b for a, b in zip(spent, last, strict=True)),
        )
        for name, spent in timings.items()
    }


def clock(step: Step) -> Clock:
    """A clock of calls in this process."""

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - start) / calls

    return seconds
