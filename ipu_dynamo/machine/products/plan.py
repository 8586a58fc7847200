"""Plan how a product is divided over tiles, and price that."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is calculated: parts side by side on tiles, and serial steps.

    Args:
        kind: of the product, see `ProductKind`.
        groups, rows, inner, columns: parts side by side of the batch, of the field, of the sums
            and of the outputs. Each part is a tile's.
        steps: serial steps over the outputs.
        swapped: the second operand takes the place of the first.
        compute, exchange, reduction, barriers: cycles of one serial step.
        temporary: bytes on a tile.
        received: bytes that a tile receives in a step: of both operands and of partial sums.
    """

    kind: str
    groups: int
    rows: int
    inner: int
    columns: int
    steps: int
    swapped: bool
    compute: float
    exchange: float
    reduction: float
    barriers: float
    temporary: int
    received: tuple[int, ...]

    def __str__(self) -> str:
        batch = f"{self.groups} x " if self.groups > 1 else ""
        steps = f", {self.steps} serial steps" if self.steps > 1 else ""
        return f"{self.kind}: {batch}{self.rows} x {self.inner} x {self.columns}{steps}"
