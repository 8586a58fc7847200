"""Say how a value stands to the micro-batches of a call, and what a row of the table says."""

from dataclasses import dataclass
from enum import Enum

from torch import fx


class Kind(Enum):
    """How a value stands to the micro-batches, when none has a block of it."""

    REPLICATE = "the same for all, known before them"
    PER_MICRO_BATCH = "every micro-batch has its own"
    PARTIAL = "the sum over all is the value"
    DEFERRED = "known after all"


@dataclass(frozen=True, slots=True)
class Shard:
    """Micro-batch m has the m-th of n equal blocks along `dim`.

    With `outer` > 1 the dimension is `outer` repetitions of all rows, as when [time, batch] become
    one dimension, and a block is one of each repetition.
    """

    dim: int
    outer: int = 1


Placement = Kind | Shard
Placements = Placement | tuple[Placement, ...]
Label = int | str | None  # dimensions with the same label are cut together; None: not cut
Labels = tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """What the table says of one call.

    Args:
        operands: tensors with the labels of their dimensions; others have none.
        results: labels of each result. One without the label that is cut is a partial sum.
        sizes: the argument that is the shape of the result, if there is one.
        count: the argument that is the number of rows, if there is one.
        mean: results whose partial sums are averaged.
        too_large: each block of the result is n times its part of the whole one.
        outer: repetitions in the result, where they differ from those in the operand.
        first: whole tensors of which each micro-batch reads the first block: numbers of its rows.
    """

    operands: tuple[tuple[fx.Node, Labels | Kind], ...]
    results: tuple[Labels | Kind, ...]
    sizes: str = ""
    count: str = ""
    mean: frozenset[int] = frozenset()
    too_large: bool = False
    outer: int | None = None
    first: tuple[tuple[fx.Node, Labels], ...] = ()
