"""Define the placements of values in micro-batches, and the pieces of a graph cut for them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from torch import Tensor, fx

from ipu_dynamo.capture.capture import Joint


class Kind(Enum):
    """The placement of a value that is not cut into blocks for micro-batches."""

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
Phase = Literal["before", "loop", "after"]
Joining = Literal["rows", "sum"]


@dataclass(frozen=True, slots=True)
class Row:
    """The rule of the table for one call.

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


@dataclass
class Split:
    """The decision.

    Args:
        n: micro-batches.
        at: the placement of every node.
        slices: whole arguments of which an operator reads a block.
        first: whole arguments of which an operator reads the first block in each micro-batch.
        args: arguments that differ on a micro-batch: sizes and numbers of rows.
        means: values that a micro-batch multiplies by 1 / n.
    """

    n: int
    at: dict[fx.Node, Placements] = field(default_factory=dict)
    slices: dict[fx.Node, dict[fx.Node, Shard]] = field(default_factory=dict)
    first: dict[fx.Node, dict[fx.Node, Shard]] = field(default_factory=dict)
    args: dict[fx.Node, tuple[Any, ...]] = field(default_factory=dict)
    means: set[fx.Node] = field(default_factory=set)

    def of(self, node: fx.Node) -> Placement:
        """The placement of a node that is one tensor, or a list of tensors with the same one."""
        placement = self.at[node]
        assert not isinstance(placement, tuple)
        return placement


@dataclass(frozen=True)
class Join:
    """The way to join values of micro-batches into one.

    Args:
        how: blocks of `rows`, or a sum in the order of micro-batches.
        like: the result on the whole batch.
    """

    how: Joining
    rows: Shard
    like: Tensor


@dataclass(frozen=True)
class Piece:
    """A capture of one phase.

    Args:
        sources: for each of its inputs, the tensor that it reads: an argument, or a result of an
            earlier piece.
        slices: inputs that are blocks of their source.
        results: names of its outputs outside, in order.
        joins: for the loop, how each becomes one value.
    """

    phase: Phase
    capture: Joint
    sources: dict[str, str]
    slices: dict[str, Shard]
    results: tuple[str, ...]
    joins: tuple[Join, ...]
