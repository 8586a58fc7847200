"""Hold the rules of micro-batches for operators that move, join and reduce dimensions."""

import math
from typing import Any

import torch

from ipu_dynamo.passes.micro_batch.batch_placements import (
    Answer,
    Kind,
    Question,
    Rows,
    Rule,
    aligned,
    listed,
    shape_of,
    together,
)

aten = torch.ops.aten
ADDING = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}
MEANS = {aten.mean.default, aten.mean.dim}
SEVERAL = {aten.max.dim, aten.min.dim, aten.sort.default, aten.topk.default}


def view(q: Question) -> Answer | None:
    """A view keeps the order of elements: rows are found again behind as many repetitions."""
    rows, shape, sizes = q.at[q.node.all_input_nodes[0]], q.shape(0), list(shape_of(q.node))
    if not isinstance(rows, Rows) or 0 in sizes:
        return None
    repetitions = math.prod(shape[: rows.dim]) * rows.outer
    found = []
    for dim, size in enumerate(sizes):
        outer, rest = divmod(repetitions, math.prod(sizes[:dim]))
        if rest == 0 < outer and size % outer == 0 < size and size // outer % q.n == 0:
            found.append(Rows(dim, outer))
    if not found:
        return None
    result = min(found, key=lambda r: r.outer)
    sizes[result.dim] //= q.n
    return q.with_args(result, {1: sizes})


def expand(q: Question) -> Answer | None:
    dim = q.dim(0)
    if dim is None:
        return None
    sizes = list(shape_of(q.node))
    dim += len(sizes) - len(q.shape(0))
    sizes[dim] //= q.n
    return q.with_args(Rows(dim), {1: sizes})


def permute(q: Question) -> Answer | None:
    dim, rank = q.dim(0), len(q.shape(0))
    if dim is None:
        return None
    order: list[int] = [d % rank for d in q.args[1]]
    return Answer(Rows(order.index(dim)))


def transpose(q: Question) -> Answer | None:
    dim, rank = q.dim(0), len(q.shape(0))
    if dim is None:
        return None
    a, b = (q.axis(1), q.axis(2)) if len(q.args) > 1 else (0, rank - 1)
    return Answer(Rows({a: b, b: a}.get(dim, dim)))


def unsqueeze(q: Question) -> Answer | None:
    dim, rank = q.dim(0), len(q.shape(0))
    if dim is None:
        return None
    new = q.args[1] % (rank + 1)
    return Answer(Rows(dim + (new <= dim)))


def squeeze(q: Question) -> Answer | None:
    dim = q.dim(0)
    if dim is None:
        return None
    shape = q.shape(0)
    axes = listed(q, len(shape))
    if dim in axes and shape[dim] == q.n:
        return None  # a micro-batch has one row, whose dimension would be gone
    gone = [d for d in axes if d < dim and shape[d] == 1]
    return Answer(Rows(dim - len(gone)))


def except_along(position: int, default: int = 0) -> Rule:
    """Operators that work along the dimension at `position`, on each row along others."""

    def rule(q: Question) -> Answer | None:
        dim = q.dim(0)
        if dim is None or q.axis(position, default) == dim:
            return None
        value = q.node.meta["val"]
        if isinstance(value, tuple) and q.node.target in SEVERAL:
            return Answer((Rows(dim),) * len(value))
        return Answer(Rows(dim))

    return rule


def sort(q: Question) -> Answer | None:
    dim = q.dim(0)
    axis: Any = q.node.kwargs.get("dim", -1)
    if dim is None or axis % len(q.shape(0)) == dim:
        return None
    return Answer((Rows(dim), Rows(dim)))


def flip(q: Question) -> Answer | None:
    dim = q.dim(0)
    return None if dim is None or dim in listed(q, len(q.shape(0))) else Answer(Rows(dim))


def select(q: Question) -> Answer | None:
    dim, axis = q.dim(0), q.axis(1)
    return None if dim is None or dim == axis else Answer(Rows(dim - (axis < dim)))


def cat(q: Question) -> Answer | None:
    sources = list(q.args[0])
    shape = shape_of(q.node)
    axis = (q.args[1] if len(q.args) > 1 else 0) % len(shape)
    dims = {found.dim for s in sources if isinstance(found := q.at[s], Rows)}
    if len(dims) != 1 or any(len(shape_of(s)) != len(shape) for s in sources):
        return None
    (dim,) = dims
    others = [s for s in sources if not isinstance(q.at[s], Rows)]
    if dim == axis or any(q.at[s] is not Kind.WHOLE for s in others):
        return None
    return Answer(Rows(dim), dict.fromkeys(others, dim))


def stack(q: Question) -> Answer | None:
    sources = list(q.args[0])
    matched = together(q, sources, shape_of(sources[0]))
    dim, slices = matched if matched is not None else (None, {})
    if dim is None:
        return None
    axis = (q.args[1] if len(q.args) > 1 else 0) % len(shape_of(q.node))
    return Answer(Rows(dim + (axis <= dim)), slices)


def reduce(q: Question) -> Answer | None:
    """Sums and the like: over other dimensions each row has its own, over rows they add up."""
    dim, rank = q.dim(0), len(q.shape(0))
    if dim is None:
        return None
    axes = listed(q, rank)
    if dim in axes:
        return Answer(Kind.SUM) if q.node.target in ADDING else None
    keep = len(shape_of(q.node)) == rank
    new = dim if keep else dim - sum(axis < dim for axis in axes)
    value = q.node.meta["val"]
    return Answer((Rows(new),) * len(value) if isinstance(value, tuple) else Rows(new))


def select_backward(q: Question) -> Answer | None:
    dim, sizes = q.dim(0), list(q.args[1])
    if dim is None:
        return None
    axis = q.args[2] % len(sizes)
    dim += axis <= dim
    sizes[dim] //= q.n
    return q.with_args(Rows(dim), {1: sizes})


def slice_backward(q: Question) -> Answer | None:
    dim, sizes = q.dim(0), list(q.args[1])
    if dim is None or q.args[2] % len(sizes) == dim:
        return None
    sizes[dim] //= q.n
    return q.with_args(Rows(dim), {1: sizes})


def slice_(q: Question) -> Answer | None:
    dim, axis = q.dim(0), q.axis(1)
    if dim is None:
        return None
    if dim == axis and shape_of(q.node) == q.shape(0):  # takes everything
        return q.with_args(Rows(dim), {2: None, 3: None} if len(q.args) > 3 else {})
    return None if dim == axis else Answer(Rows(dim))


def like(q: Question) -> Answer | None:
    dim = q.dim(0)
    return Answer(Kind.EACH if dim is None else Rows(dim))


def pad(q: Question) -> Answer | None:
    dim, pad = q.dim(0), list(q.args[1])
    if dim is None:
        return None
    from_end = len(q.shape(0)) - 1 - dim
    padded = any(pad[2 * from_end : 2 * from_end + 2])
    return None if padded else Answer(Rows(dim))


def triangle(q: Question) -> Answer | None:
    dim = q.dim(0)
    return None if dim is None or dim >= len(q.shape(0)) - 2 else Answer(Rows(dim))


def gather(q: Question) -> Answer | None:
    found = aligned(q, [i for i in (0, 2, 3) if i < len(q.args)])
    if found is None or q.axis(1) == found[0]:
        return None
    return Answer(Rows(found[0]), found[1])
