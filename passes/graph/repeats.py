"""Find stretches of a sequence that repeat one after the other."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

LEAST = 3  # repetitions
_WINDOWS = (1, 4, 16)  # elements that are looked up together, to learn how far apart they repeat
_CANDIDATES = 12  # distances to try for each window


@dataclass(frozen=True, slots=True)
class Run:
    """`sequence[i] == sequence[i + period]` for all i from `start` to `stop - period`."""

    start: int
    stop: int
    period: int

    @property
    def count(self) -> int:
        """How many whole periods it has."""
        return (self.stop - self.start) // self.period


def find_runs(sequence: Sequence[Hashable]) -> list[Run]:
    """Runs of at least three periods that share no element, by position.

    Those that leave the fewest elements unique come first; then those of the shorter period.
    """
    numbers = {value: number for number, value in enumerate(dict.fromkeys(sequence))}
    left = [numbers[value] for value in sequence]
    found: list[Run] = []
    periods = _periods(left)
    while runs := [run for period in periods for run in _runs(left, period)]:
        periods = list(dict.fromkeys(run.period for run in runs))
        for run in sorted(runs, key=lambda run: ((1 - run.count) * run.period, run.period)):
            if _free(left, run):
                found.append(run)
                for index in range(run.start, run.stop):
                    left[index] = -1 - index  # equal to nothing
    return sorted(found, key=lambda run: run.start)


def _free(numbers: Sequence[int], run: Run) -> bool:
    return all(number >= 0 for number in numbers[run.start : run.stop])


def _periods(numbers: Sequence[int]) -> list[int]:
    """Distances at which elements often come again."""
    found: dict[int, None] = {}
    for window in _WINDOWS:
        last: dict[tuple[int, ...], int] = {}
        distances: Counter[int] = Counter()
        for index in range(len(numbers) - window + 1):
            key = tuple(numbers[index : index + window])
            if key in last:
                distances[index - last[key]] += 1
            last[key] = index
        found |= dict.fromkeys(distance for distance, _ in distances.most_common(_CANDIDATES))
    return list(found)


def _runs(numbers: Sequence[int], period: int) -> list[Run]:
    """The maximal runs of one period."""
    runs = []
    start = 0
    for index in range(len(numbers) - period + 1):
        if index + period < len(numbers) and numbers[index] == numbers[index + period]:
            continue
        if index - start >= (LEAST - 1) * period:
            runs.append(Run(start, index + period, period))
        start = index + 1
    return runs
