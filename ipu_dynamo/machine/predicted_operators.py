"""Define the part of a prediction about operators: costs, and calls that run them.

All cycles are whole tile cycles, so that sums are exact. Fields named after a list of the
prediction hold positions in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Literal, Self

MarkWord = Literal["F", "D", "fitted", "M"]  # read in a source, derived, fitted, recalled
MARKS: tuple[MarkWord, ...] = ("F", "D", "fitted", "M")  # from the most certain to the least
Where = Literal["forward", "backward", "around"]  # a pass, or the work around the micro-batches


@dataclass(frozen=True, slots=True)
class Cycles:
    """Cycles of operators, by the kind of work."""

    compute: int = 0
    exchange: int = 0
    relayout: int = 0
    reduction: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        """The sum of the columns."""
        return self.compute + self.exchange + self.relayout + self.reduction + self.overhead

    def __add__(self, other: "Cycles") -> "Cycles":
        return Cycles(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> "Cycles":
        return Cycles(*(times * getattr(self, f.name) for f in fields(self)))

    @classmethod
    def sum(cls, parts: Iterable[Self]) -> "Cycles":
        """The sum of any number of cycles."""
        return reduce(add, parts, Cycles())


@dataclass(frozen=True, slots=True)
class ColumnMarks:
    """The mark of each column of an operator's cycles; None: the column is empty."""

    compute: MarkWord | None = None
    exchange: MarkWord | None = None
    relayout: MarkWord | None = None
    reduction: MarkWord | None = None
    overhead: MarkWord | None = None


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """Where an operator runs.

    Args:
        module: the user's module, a position in `modules`.
        count: runs in a micro-batch; of work around the micro-batches, in a step.
    """

    ipu: int
    stage: int
    module: int
    count: int


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """Operators that are equal in name, types, line, direction and cost.

    Args:
        operator: its name with the overload, `aten.mm.default`, or an instruction and its action.
        operands, results: types, such as `f16[8,16]`.
        line: the user's source line, or empty.
        cycles: of one run.
        flops: of the products in it.
        bound_flops, bound_exchange, bound_memory: the least cycles that one run takes, for its
            products, for the bytes that tiles receive, for the bytes that they read and write.
        temporary: bytes on a tile.
        plan: how a product is split, or empty.
        steps: serial steps of a product.
        known: whether there is a formula for it.
        uses: where it runs.
        warning: an assumption of the price, or why no plan fits its share of memory; or empty.
    """

    operator: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    line: str
    direction: Where
    cycles: Cycles
    marks: ColumnMarks
    flops: int
    bound_flops: int
    bound_exchange: int
    bound_memory: int
    nbytes: int  # of operands and results
    temporary: int
    plan: str
    steps: int
    known: bool
    uses: tuple[OperatorUse, ...]
    warning: str = ""

    @property
    def bound(self) -> int:
        """The largest of the bounds."""
        return max(self.bound_flops, self.bound_exchange, self.bound_memory)

    @property
    def count(self) -> int:
        """Runs on all IPUs, in a micro-batch, or in a step for work around the micro-batches."""
        return sum(use.count for use in self.uses)


@dataclass(frozen=True, slots=True)
class OperatorBlock:
    """The operators that a function runs; calls that run the same ones share a block.

    Args:
        function: name of the first such function.
        operators: a row of `operators` for each program step, in order.
    """

    function: str
    operators: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallRow:
    """A call of the program in a micro-batch, in program order.

    Args:
        name: of its stage pass, such as `0F`.
        block: its operators, a position in `blocks`.
        cycles: of one run.
    """

    name: str
    ipu: int
    stage: int
    direction: Literal["forward", "backward", "forward_backward", "weights"]
    block: int
    cycles: int
    line: str
