"""Give each number of the machine model its unit, its source and a mark of how sure it is."""

from collections.abc import Iterable
from typing import Any, Literal, Self

Mark = Literal["F", "D", "fitted", "M"]
MARKS: tuple[Mark, ...] = ("F", "D", "fitted", "M")  # from the most certain to the least


class Figure(float):
    """A number with its unit, its source and its mark. It calculates like any other float.

    Args:
        mark: `F`, read in a public source; `D`, derived from such numbers; `fitted` to measured
            rows; `M`, a guess, or remembered.
    """

    __slots__ = ("mark", "source", "unit")
    unit: str
    mark: Mark
    source: str

    def __new__(cls, value: float, unit: str, mark: Mark, source: str) -> Self:
        figure = super().__new__(cls, value)
        figure.unit, figure.mark, figure.source = unit, mark, source
        return figure

    def __getnewargs__(self) -> tuple[Any, ...]:  # for copies
        return float(self), self.unit, self.mark, self.source

    def __repr__(self) -> str:
        return f"Figure({float(self)!r}, {self.unit!r}, {self.mark!r}, {self.source!r})"


def mark_of_number(value: float) -> Mark:
    """The mark of a number; of one that a user gave without a source, `M`."""
    return value.mark if isinstance(value, Figure) else "M"


def least_certain(marks: Iterable[Mark]) -> Mark:
    """The mark of a result is that of its least certain number; without any, `F`."""
    return max(marks, key=MARKS.index, default="F")
