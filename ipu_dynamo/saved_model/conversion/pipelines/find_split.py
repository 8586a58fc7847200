"""Cut a row of costs into groups, greedily from the left.

Source: IPU TensorFlow Addons, "IPU SavedModel CLI", auto pipelines: each group takes what is
nearest to the mean of the rest, and rather one node more.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

Cost = int | float | Fraction


def find_split(costs: Sequence[Cost], groups: int) -> list[tuple[int, ...]]:
    """All splits that the greedy rule finds, each as the sizes of its groups.

    Cuts that are equally good all go on, in their order; so there may be as many splits as two to
    the power of `groups`. Sums are exact.

    Args:
        costs: of the nodes, in their order.
        groups: how many there shall be; with more groups than nodes there is no split.

    Raises:
        ValueError: `groups` is less than 1.

    Example:
        find_split([1, 1, 1, 3], 2)  # [(3, 1)]
    """
    row = _Row(costs, groups)
    return _splits(row, 0, groups) if len(costs) >= groups else []


def first_split(costs: Sequence[Cost], groups: int) -> tuple[int, ...] | None:
    """The first result of `find_split`, without the others; None if it has no result."""
    row = _Row(costs, groups)
    if len(costs) < groups:
        return None
    sizes: list[int] = []
    for left in range(groups, 0, -1):
        sizes.append(row.separators(sum(sizes), left)[0])
    return tuple(sizes)


class _Row:
    """Costs of nodes as exact sums."""

    def __init__(self, costs: Sequence[Cost], groups: int) -> None:
        if groups < 1:
            raise ValueError(f"groups is {groups}; it is at least 1")
        exact = [cost if isinstance(cost, int) else Fraction(cost) for cost in costs]
        self._sums = [0, *accumulate(exact)]

    def separators(self, start: int, groups: int) -> list[int]:
        """The best sizes of the first group of those from `start` on, ascending."""
        count = len(self._sums) - 1 - start
        if groups == 1:
            return [count]
        before, rest = self._sums[start], self._sums[-1] - self._sums[start]
        # (sum - rest / groups)^2 - size, times groups^2: no division, so nothing is rounded
        values = {
            size: ((self._sums[start + size] - before) * groups - rest) ** 2 - size * groups**2
            for size in range(1, count - groups + 2)
        }
        least = min(values.values())
        return [size for size, value in values.items() if value == least]


def _splits(row: _Row, start: int, groups: int) -> list[tuple[int, ...]]:
    if groups == 1:
        return [tuple(row.separators(start, 1))]
    return [
        (size, *rest)
        for size in row.separators(start, groups)
        for rest in _splits(row, start + size, groups - 1)
    ]
