"""Hold the rules of micro-batches for products, layers and losses, and for their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ipu_dynamo.passes.micro_batch.batch_placements import (
    Answer,
    Kind,
    Question,
    Rows,
    Rule,
    aligned,
    elementwise,
    shape_of,
    together,
)

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # the argument `reduction` of losses


def product(q: Question, first: int = 0) -> Answer | None:
    """Matrix products, of two matrices or of two stacks of them, at `first` and behind it."""
    a, b = q.args[first], q.args[first + 1]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    stacked = len(shape_of(a)) == 3
    rows = (q.dim(first), q.dim(first + 1))
    left, inner_a, inner_b, right = (1, 2, 1, 2) if stacked else (0, 1, 0, 1)
    names = {(left, None): left, (None, right): right}
    if stacked and 0 in rows:
        if any(r not in (0, None) for r in rows):
            return None
        slices = {x: 0 for x, r in zip((a, b), rows, strict=True) if r is None}
        return Answer(Rows(0), slices) if all(q.at[x] is Kind.WHOLE for x in slices) else None
    if rows in names and q.whole(first + (0 if rows[0] is None else 1)):
        return Answer(Rows(names[rows]))
    if first == 0 and rows[0] in (inner_a, None) and rows[1] in (inner_b, None):
        slices = {}
        if rows[0] is None:
            slices[a] = inner_a
        if rows[1] is None:
            slices[b] = inner_b
        return Answer(Kind.SUM, slices) if all(q.at[x] is Kind.WHOLE for x in slices) else None
    return None


def product_and_sum(q: Question) -> Answer | None:
    """`addmm`, `baddbmm`: the first argument broadcasts to the product of the others."""
    found, bias = product(q, first=1), q.args[0]
    if found is None or not isinstance(found.results, Rows) or not isinstance(bias, fx.Node):
        return None
    shape, own = shape_of(bias), shape_of(q.node)
    dim = found.results.dim - len(own) + len(shape)
    spread = dim < 0 or shape[dim] == 1
    if q.dim(0) is not None:
        return found if q.dim(0) == dim else None
    if q.at[bias] is not Kind.WHOLE:
        return None
    return found if spread else Answer(found.results, {**found.slices, bias: dim})


def embedding(q: Question) -> Answer | None:
    dim = q.dim(1)
    return Answer(Rows(dim)) if dim is not None and q.whole(0) else None


def embedding_backward(q: Question) -> Answer | None:
    rank = len(q.shape(1))
    by_frequency = len(q.args) > 4 and q.args[4]
    dims = (q.dim(0), q.dim(1))
    if by_frequency or all(d is None for d in dims) or rank == 0:
        return None
    (dim, *others) = {d for d in dims if d is not None}
    if others or dim >= rank:
        return None
    missing = [q.args[i] for i in (0, 1) if dims[i] is None]
    if any(not isinstance(m, fx.Node) or q.at[m] is not Kind.WHOLE for m in missing):
        return None
    return Answer(Kind.SUM, {m: dim for m in missing if isinstance(m, fx.Node)})


def row_by_row(rows: Sequence[int], results: str, limit: int = 1, size: int | None = None) -> Rule:
    """Layers: a row of the results needs the same row of the arguments at `rows`.

    Args:
        results: one letter each: `r` rows, `s` sum.
        limit: rows may be along the first so many dimensions.
        size: position of an argument that is the number of rows.
    """

    def rule(q: Question) -> Answer | None:
        others = [i for i in range(len(q.args)) if i not in rows]
        found = aligned(q, rows)
        if found is None or found[0] >= limit or not q.whole(*others):
            return None
        dim, slices = found
        placed = tuple(Rows(dim) if letter == "r" else Kind.SUM for letter in results)
        args = None
        if size is not None:
            changed = {size: q.args[size] // q.n}
            args = q.with_args(placed, changed).args
        return Answer(placed if len(placed) > 1 else placed[0], slices, args)

    return rule


def layer_norm(q: Question) -> Answer | None:
    free = len(q.shape(0)) - len(q.args[1])
    return row_by_row((0,), "rrr", limit=free)(q)


def layer_norm_backward(q: Question) -> Answer | None:
    free = len(q.shape(0)) - len(q.args[2])
    return row_by_row((0, 1, 3, 4), "rss", limit=free)(q)


def batch_norm(q: Question) -> Answer | None:
    """Training uses each micro-batch's own statistics; the running ones are averaged later."""
    position = 5 if q.node.target is aten._native_batch_norm_legit_functional.default else 99
    training = position < len(q.args) and q.args[position]
    if q.dim(0) != 0 or not q.whole(1, 2, 3, 4):
        return None
    if not training:
        return Answer((Rows(0),) + (Kind.EACH,) * (len(q.node.meta["val"]) - 1))
    return Answer((Rows(0), Kind.EACH, Kind.EACH, Kind.SUM, Kind.SUM))


def batch_norm_backward(q: Question) -> Answer | None:
    found = aligned(q, (0, 1))
    if found is None or found[0] != 0 or not q.whole(2, 3, 4):
        return None
    return Answer((Rows(0), Kind.SUM, Kind.SUM), found[1])


def attention(count: int, results: int) -> Rule:
    """Fused attention: stacks of heads, of which `count` lead the arguments; dim 0 is the batch."""

    def rule(q: Question) -> Answer | None:
        found = aligned(q, range(count))
        if found is None or found[0] > 1 or not q.whole(*range(count, len(q.args))):
            return None
        dim, slices = found
        mask = q.node.kwargs.get("attn_mask")
        if isinstance(mask, fx.Node):
            own = dim - 4 + len(shape_of(mask))
            spread = own < 0 or shape_of(mask)[own] == 1
            held = q.at[mask]
            if held is Kind.WHOLE and not spread:
                slices = {**slices, mask: own}
            elif not (held is Kind.WHOLE or held == Rows(own)):
                return None
        return Answer((Rows(dim),) * results, slices)

    return rule


def row_by_last(q: Question) -> Answer | None:
    """The gradients of softmax: gradient, result, dimension."""
    found = aligned(q, (0, 1))
    return None if found is None or q.axis(2) == found[0] else Answer(Rows(found[0]), found[1])


def nll(q: Question) -> Answer | None:
    """A mean is a sum over micro-batches too, of losses and of weights: the pass divides them."""
    found = aligned(q, (0, 1))
    if found is None or found[0] != 0 or len(q.shape(0)) < 2 or not q.whole(2):
        return None
    if q.args[3] == NONE:
        return Answer((Rows(0), Kind.SUM), found[1])
    return Answer((Kind.SUM, Kind.SUM), found[1])


def nll_backward(q: Question) -> Answer | None:
    each = q.args[4] == NONE  # no reduction: the gradient has rows as well
    found = aligned(q, (0, 1, 2) if each else (1, 2))
    if found is None or found[0] != 0 or not q.whole(3, *(() if each else (0, 6))):
        return None
    return Answer(Rows(0), found[1])


def loss(q: Question) -> Answer | None:
    """`mse_loss` and its like: element by element, then nothing, a mean or a sum."""
    sources = q.node.all_input_nodes
    shape = shape_of(q.args[0])
    matched = together(q, sources, shape)
    if matched is None or matched[0] is None:
        return None
    plain = reduction(q.node) == NONE
    return Answer(Rows(matched[0]) if plain else Kind.SUM, matched[1])


def loss_backward(q: Question) -> Answer | None:
    found = elementwise(q)
    if found is None or not isinstance(found.results, Rows):
        return None
    return found


def reduction(node: fx.Node) -> object:
    """The value of the argument `reduction`: NONE, MEAN or SUM."""
    target: Any = node.target
    schema = target._schema
    place = [argument.name for argument in schema.arguments].index("reduction")
    return node.args[place] if place < len(node.args) else MEAN
