"""Define the cost of an operator on an IPU: cycles in columns, memory, bounds, and marks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ipu_dynamo.machine.figure import Mark, least_certain
from ipu_dynamo.machine.ipu import Ipu
from ipu_dynamo.machine.products.plan import Plan
from ipu_dynamo.program.machine_operators import MachineOperator

Column = Literal["compute", "exchange", "relayout", "reduction", "overhead"]
COLUMNS: tuple[Column, ...] = ("compute", "exchange", "relayout", "reduction", "overhead")


@dataclass(frozen=True, slots=True)
class Resources:
    """Where an operator runs.

    Args:
        proportion: the share of a tile's memory that a product may use for temporary values.
        io_tiles: tiles that only transfer.
        partials: of products of halves whose operator has no type of partial sums.
    """

    ipu: Ipu
    proportion: float = 0.6
    io_tiles: int = 0
    partials: Literal["float", "half"] = "float"

    @property
    def tiles(self) -> int:
        """Tiles that compute."""
        return int(self.ipu.tiles) - self.io_tiles


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of operands of an operator, by their places in `MachineOperator.operands`.

    Args:
        weights: variables of the program.
        from_host: those that the host sent and that no other operator reads.
        dying: those that no later operator reads, whose memory a result may take.
        bodies: the same of the operators of each body of a loop or branch; empty: nothing is known.
    """

    weights: frozenset[int] = frozenset()
    from_host: frozenset[int] = frozenset()
    dying: frozenset[int] = frozenset()
    bodies: "tuple[tuple[Roles, ...], ...]" = ()


NO_ROLES = Roles()


@dataclass(frozen=True, slots=True)
class Bounds:
    """Cycles below which no price may be.

    Args:
        flops: of products, at the peak rate of their kind.
        exchange: of the bytes that tiles receive, if two neighbours always share a bus.
        memory: of the bytes that an operator reads and writes in the memory of all tiles.
    """

    flops: float = 0.0
    exchange: float = 0.0
    memory: float = 0.0

    @property
    def largest(self) -> float:
        return max(self.flops, self.exchange, self.memory)

    def __add__(self, other: "Bounds") -> "Bounds":
        return Bounds(
            self.flops + other.flops, self.exchange + other.exchange, self.memory + other.memory
        )

    def __mul__(self, times: float) -> "Bounds":
        return Bounds(self.flops * times, self.exchange * times, self.memory * times)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an operator. Columns are cycles of an IPU; their sum is `cycles`.

    Args:
        overhead: barriers, and the fixed cost of every operator.
        marks: of each column that has cycles.
        plan: of a product.
        temporary: bytes on a tile while it runs, without its operands and results.
        flops: of products.
        exchanges: bytes that a tile receives, for each operand that moves.
        in_place: the first operand's memory becomes that of the result.
        known: it has a formula; a guess otherwise.
        warning: that no plan fits the proportion, or that rounds are assumed; or empty.
        parts: the operators that the machine runs in its place, with their costs; empty: itself.
            Those of a loop have the cost of one round.
    """

    compute: float = 0.0
    exchange: float = 0.0
    relayout: float = 0.0
    reduction: float = 0.0
    overhead: float = 0.0
    marks: Mapping[Column, Mark] = field(default_factory=dict)
    plan: Plan | None = None
    temporary: int = 0
    flops: int = 0
    bounds: Bounds = Bounds()
    exchanges: tuple[int, ...] = ()
    in_place: bool = False
    known: bool = True
    warning: str = ""
    parts: "tuple[tuple[MachineOperator, Cost], ...]" = ()

    @property
    def cycles(self) -> float:
        return self.compute + self.exchange + self.relayout + self.reduction + self.overhead

    @property
    def steps(self) -> int:
        """Steps of the machine's program: one more than exchanges. Parts have their own."""
        return 0 if self.parts else len(self.exchanges) + 1

    def __add__(self, other: "Cost") -> "Cost":
        """One after the other: the larger temporary memory counts."""
        marks = {
            column: least_certain(c.marks[column] for c in (self, other) if column in c.marks)
            for column in COLUMNS
            if column in self.marks or column in other.marks
        }
        return Cost(
            self.compute + other.compute,
            self.exchange + other.exchange,
            self.relayout + other.relayout,
            self.reduction + other.reduction,
            self.overhead + other.overhead,
            marks=marks,
            plan=self.plan or other.plan,
            temporary=max(self.temporary, other.temporary),
            flops=self.flops + other.flops,
            bounds=self.bounds + other.bounds,
            exchanges=self.exchanges + other.exchanges,
            in_place=self.in_place or other.in_place,
            known=self.known and other.known,
            warning=self.warning or other.warning,
            parts=self.parts + other.parts,
        )

    def __mul__(self, times: float) -> "Cost":
        """Repeated by one piece of code."""
        columns = {column: getattr(self, column) * times for column in COLUMNS}
        return replace(self, **columns, flops=round(self.flops * times), bounds=self.bounds * times)


Price = Callable[[MachineOperator, Resources, Roles], Cost]
