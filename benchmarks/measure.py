"""Time contenders for the same work in turn, so that a busy machine slows all alike."""

import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Step = Callable[[], object]
Maker = Callable[[], Step]
Clock = Callable[[int], float]  # seconds per call, over so many calls
Figures = dict[str, float]  # what was measured, by name


class WrongValuesError(Exception):
    """A contender computes other values than plain PyTorch, and is not timed.

    Args:
        apart: the largest difference, in parts of the largest value.
    """

    def __init__(self, apart: float) -> None:
        super().__init__(apart)
        self.apart = apart


@dataclass(frozen=True, slots=True)
class Checked:
    """A step whose values are compared after its first call; the comparison is not timed.

    Args:
        check: raises `WrongValuesError`.
    """

    step: Step
    check: Callable[[], None]

    def __call__(self) -> object:
        return self.step()


@dataclass(frozen=True, slots=True)
class Wrong:
    """The result of a contender with wrong values, which has no times; see the error."""

    apart: float


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one contender, in seconds.

    Args:
        first: its first call, with compilation.
        median: the median of the later calls.
        fastest: the fastest of them.
        calls: how many later calls were timed.
        ratio: the median over the rounds of its time divided by the last contender's.
        lower, upper: the quartiles of that.
    """

    first: float
    median: float
    fastest: float
    calls: int
    ratio: float
    lower: float
    upper: float


def side_by_side(contenders: Mapping[str, Clock], *, seconds: float) -> dict[str, Timing | Wrong]:
    """Call the contenders in turn, for about `seconds` in all and at least 5 rounds.

    A round calls each contender in a burst that takes about 10 ms, which counts as one timing.
    """
    first: dict[str, float] = {}
    wrong: dict[str, Wrong] = {}
    for name, clock in contenders.items():
        try:
            first[name] = clock(1)
        except WrongValuesError as error:
            wrong[name] = Wrong(error.apart)
    timings = _in_turn({name: contenders[name] for name in first}, first, seconds)
    return {name: wrong[name] if name in wrong else timings[name] for name in contenders}


def _in_turn(
    contenders: Mapping[str, Clock], first: Mapping[str, float], seconds: float
) -> dict[str, Timing]:
    """The timings of contenders whose first calls took `first` seconds."""
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
            *_ratios(spent, last),
        )
        for name, spent in timings.items()
    }


def _ratios(spent: Sequence[float], last: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile of the ratios over the rounds."""
    ratios = [a / b for a, b in zip(spent, last, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, lower, upper


def clock(step: Step) -> Clock:
    """A clock of calls in this process."""

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - start) / calls

    return seconds


def cpu_seconds() -> float:
    """Seconds of this process and of the compilers that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def medians(runs: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """The medians of each contender's figures over its runs; one without runs is left out."""
    return {
        who: {key: statistics.median(run[key] for run in of) for key in of[0]}
        for who, of in runs.items()
        if of
    }
