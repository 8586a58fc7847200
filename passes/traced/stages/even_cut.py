"""Cut a row of things that cost time into parts of which the slowest is as fast as it can be.

`AutoPartition` cuts between operators with it. The placement of layers cuts between layers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SLACK = 1.01  # a cut this much slower than the best is taken where it is better otherwise
_SAME = 1 + 1e-9  # values up to this factor apart are equal
_BLOCK = 256  # places at once, for memory
Numbers = NDArray[np.float64]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class CutProblem:
    """A row of things to cut into parts, and the places for cuts.

    Args:
        seconds: of each thing.
        seconds_in_last: of each thing in the last part, if they are others there.
        allowed: positions where a cut may be, from 1; None: anywhere.
        taken: seconds that each part takes besides its things: its limit is lower by so much.
        sizes: how many things a part has, if that is fixed.
        crossing: of each position, the amount that crosses a cut there. Of equally fast cuts the
            one with the least is taken; None: the most even one, with larger parts later.
        may_be_empty: parts may be.
    """

    seconds: Sequence[float]
    seconds_in_last: Sequence[float] | None = None
    allowed: Collection[int] | None = None
    taken: Sequence[float] = ()
    sizes: Sequence[int | None] = ()
    crossing: Sequence[float] | None = None
    may_be_empty: bool = False


def cut(row: CutProblem, parts: int) -> tuple[int, ...] | None:
    """Where each part but the first begins: positions from 0 to the number of things.

    The slowest part is within 1 % of the best there is. None: no cut keeps all sizes. It takes
    time in proportion to the parts and to the square of the allowed positions.
    """
    count = len(row.seconds)
    positions = range(1, count) if row.allowed is None else sorted(row.allowed)
    ends = np.array([0, *positions, count])
    costs = [_Costs(row, part, parts, ends) for part in range(parts)]
    limit = _bottleneck(costs, len(ends)) * _SLACK
    if not np.isfinite(limit):
        return None
    rest = _rest(row, costs, ends, limit)
    cuts, place = [], 0
    for part in range(parts - 1):
        (here,) = _with_rest(row, costs[part], rest[part + 1], ends, slice(place, place + 1), limit)
        place = int(np.flatnonzero(here <= here.min() * _SAME)[0])
        cuts.append(int(ends[place]))
    return tuple(cuts)


class _Costs:
    """The seconds of one part by where it begins and ends; infinite where it cannot be."""

    def __init__(self, row: CutProblem, part: int, parts: int, ends: Positions) -> None:
        seconds = row.seconds
        if part == parts - 1 and row.seconds_in_last is not None:
            seconds = row.seconds_in_last
        self._ends, self._sums = ends, np.concatenate([[0.0], np.cumsum(seconds)])[ends]
        self._taken = row.taken[part] if row.taken else 0.0
        self._size = row.sizes[part] if row.sizes else None
        self._least = 0 if row.may_be_empty else 1

    def begin(self, starts: slice) -> Numbers:
        """From some places to all places: [starts, places]."""
        seconds = self._sums - self._sums[starts, None]
        sizes = self._ends - self._ends[starts, None]
        fits = sizes >= self._least if self._size is None else sizes == self._size
        return np.where(fits, np.maximum(seconds, 0.0) + self._taken, np.inf)


def _blocks(places: int) -> list[slice]:
    return [slice(start, start + _BLOCK) for start in range(0, places, _BLOCK)]


def _bottleneck(costs: Sequence[_Costs], places: int) -> float:
    """The seconds of the slowest part in the best cut."""
    before = np.full(places, np.inf)
    before[0] = 0.0
    for part in costs:
        after = np.full(places, np.inf)
        for starts in _blocks(places):
            slowest = np.maximum(before[starts, None], part.begin(starts))
            after = np.minimum(after, slowest.min(0))
        before = after
    return float(before[-1])


def _rest(row: CutProblem, costs: Sequence[_Costs], ends: Positions, limit: float) -> list[Numbers]:
    """For each part and place, the least penalty of that part and all later ones from there."""
    after = np.full(len(ends), np.inf)
    after[-1] = 0.0
    rest = [after]
    for part in reversed(costs):
        blocks = [
            _with_rest(row, part, rest[-1], ends, starts, limit).min(1)
            for starts in _blocks(len(ends))
        ]
        rest.append(np.concatenate(blocks))
    return rest[::-1]


def _with_rest(
    row: CutProblem, part: _Costs, rest: Numbers, ends: Positions, starts: slice, limit: float
) -> Numbers:
    """The penalty of a part from some places to every place, and of all later ones."""
    seconds = part.begin(starts)
    if row.crossing is None:
        penalty = np.square(seconds)
    else:
        crossing = np.asarray(row.crossing, dtype=np.float64)[ends]
        penalty = np.where(ends == ends[-1], 0.0, crossing)
    fits = seconds <= limit * _SAME + 1e-12
    return np.where(fits, penalty + rest, np.inf)
