"""Say how a value stands to the micro-batches, and ask an operator what it does to rows.

A micro-batch holds one block of n equal blocks of rows. A rule answers how an operator is run on
such a block: where the block lies in its result, or that the results of all blocks add up to the
result on the whole. It answers None where the rows meet, or where nobody has thought about it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, fx


class Kind(Enum):
    """How a value stands to the micro-batches, when it has no rows of them."""

    WHOLE = "the same for all, known before them"
    EACH = "every micro-batch has its own"
    SUM = "the sum over all is the value"
    LATE = "known after all"


@dataclass(frozen=True, slots=True)
class Rows:
    """Micro-batch m has the m-th of n equal blocks along `dim`.

    With `outer` > 1 the dimension is `outer` repetitions of all rows, as when [time, batch] become
    one dimension, and a block is one of each repetition.
    """

    dim: int
    outer: int = 1


Placement = Kind | Rows


Placements = Placement | tuple[Placement, ...]


@dataclass
class Answer:
    """How an operator runs on a micro-batch.

    Args:
        results: the placement of its result, or of each of several.
        slices: whole arguments of which it reads a block, and along which dimension.
        outer: repetitions of all rows in that dimension.
        args: its positional arguments where they differ, with sizes of a micro-batch.
    """

    results: Placements
    slices: dict[fx.Node, int] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None
    outer: int = 1


class Question:
    """An operator, with what is known of its arguments: rows, whole, or one for each."""

    def __init__(self, node: fx.Node, n: int, at: Mapping[fx.Node, Placements]) -> None:
        self.node, self.n, self.at = node, n, at
        self.args: tuple[Any, ...] = node.args

    def dim(self, position: int) -> int | None:
        """Where the rows of an argument are; None when it has none, or is no tensor."""
        arg = self.args[position] if position < len(self.args) else None
        found = self.at.get(arg) if isinstance(arg, fx.Node) else None
        return found.dim if isinstance(found, Rows) else None

    def whole(self, *positions: int) -> bool:
        """Whether these arguments are absent, numbers or the same for all micro-batches."""
        given = [self.args[p] for p in positions if p < len(self.args)]
        return all(not isinstance(a, fx.Node) or self.at[a] is Kind.WHOLE for a in given)

    def shape(self, position: int) -> tuple[int, ...]:
        return shape_of(self.args[position])

    def axis(self, position: int, default: int = 0, of: int = 0) -> int:
        """A dimension that is argument `position`, counted from the front of argument `of`."""
        given = self.args[position] if position < len(self.args) else default
        rank = len(self.shape(of))
        return given % rank if rank else 0

    def with_args(self, results: Placements, changes: Mapping[int, Any]) -> Answer:
        args = tuple(changes.get(i, a) for i, a in enumerate(self.args))
        return Answer(results, args=args)


Rule = Callable[[Question], Answer | None]


def shape_of(node: object) -> tuple[int, ...]:
    value = node.meta["val"] if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def together(
    q: Question, sources: Sequence[fx.Node], shape: Sequence[int]
) -> tuple[int | None, dict[fx.Node, int]] | None:
    """Match arguments that broadcast to `shape`: the dimension of rows, and what to slice.

    None when they have rows along different dimensions.
    """
    ends = {
        found.dim + len(shape) - len(shape_of(source))
        for source in sources
        if isinstance(found := q.at[source], Rows)
    }
    if not ends:
        return None, {}
    if len(ends) > 1:
        return None
    (dim,) = ends
    slices = {}
    for source in sources:
        own = dim - len(shape) + len(shape_of(source))
        if isinstance(q.at[source], Rows) or own < 0 or shape_of(source)[own] == 1:
            continue
        if q.at[source] is not Kind.WHOLE:
            return None
        slices[source] = own
    return dim, slices


def elementwise(q: Question) -> Answer | None:
    """Any operator whose arguments broadcast to the shape of its results."""
    value = q.node.meta["val"]
    several = isinstance(value, tuple | list)
    shape = tuple((value[0] if several else value).shape)
    matched = together(q, q.node.all_input_nodes, shape)
    if matched is None:
        return None
    dim, slices = matched
    result: Placement = Kind.EACH if dim is None else Rows(dim)
    return Answer((result,) * len(value) if several else result, slices)


def aligned(q: Question, positions: Sequence[int]) -> tuple[int, dict[fx.Node, int]] | None:
    """The dimension along which all arguments at `positions` have rows; whole ones are sliced."""
    nodes = [a for p in positions if p < len(q.args) and isinstance(a := q.args[p], fx.Node)]
    dims = {found.dim for node in nodes if isinstance(found := q.at[node], Rows)}
    whole = {node for node in nodes if q.at[node] is Kind.WHOLE}
    if len(dims) != 1 or any(not isinstance(q.at[x], Rows) and x not in whole for x in nodes):
        return None
    (dim,) = dims
    if any(len(shape_of(x)) <= dim for x in nodes) or len({shape_of(x)[dim] for x in nodes}) > 1:
        return None
    return dim, dict.fromkeys(whole, dim)


def listed(q: Question, rank: int) -> set[int]:
    """The dimensions that argument 1 lists; all, if it is absent."""
    given = q.args[1] if len(q.args) > 1 else None
    found = [given] if isinstance(given, int) else list(given or range(rank))
    return {axis % rank for axis in found}
