"""Compute in tensors of no dims the numbers that a graph reads from tensors.

Before   %u: Sym(u0) = aten._local_scalar_dense(%i);  %v: Sym(u0 + 2) = operator.add(%u, 2)
After    %two = aten.full_like(%i, 2);  %s: i64[] = aten.add(%i, %two)
Keeps    values: whole numbers are int64, truth values are bool, others float64. What read the
         numbers is the caller's to replace.
"""

import operator
from typing import Any

import torch
from torch import fx

from ipu_dynamo.passes.graph.builder import evaluate

aten = torch.ops.aten
_SAME: dict[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.neg: aten.neg.default,
    operator.lt: aten.lt.Tensor,
    operator.le: aten.le.Tensor,
    operator.gt: aten.gt.Tensor,
    operator.ge: aten.ge.Tensor,
    operator.eq: aten.eq.Tensor,
    operator.ne: aten.ne.Tensor,
    operator.and_: aten.logical_and.default,
    operator.or_: aten.logical_or.default,
    torch.sym_not: aten.logical_not.default,
    torch.sym_ite: aten.where.self,
    torch.sym_min: aten.minimum.default,
    torch.sym_max: aten.maximum.default,
}
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def number_as_tensor(number: Any, *, plan: bool = False) -> fx.Node | None:
    """The tensor of a number that operators read from tensors; None where it is not known how.

    Args:
        plan: only ask, and get the number itself.

    What is inserted stands before the node `number`, and has its source line.
    """
    if not isinstance(number, fx.Node) or not _is_known(number):
        return None
    return number if plan else _converted(number, {})


def insert(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call that has the metadata of `before`, which it helps to replace, and its own value."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta = dict(before.meta)
    node.meta["val"] = evaluate(node, before)
    return node


def _is_known(number: fx.Node) -> bool:
    """Whether all that a number is computed from can be computed in tensors."""
    if number.target is aten._local_scalar_dense.default:
        return True
    parts = [part for part in number.args if not isinstance(part, bool | int | float)]
    known = all(isinstance(part, fx.Node) and _is_known(part) for part in parts)
    return number.target in _SAME and bool(parts) and known


def _converted(number: fx.Node, done: dict[fx.Node, fx.Node]) -> fx.Node:
    if number in done:
        return done[number]
    if number.target is aten._local_scalar_dense.default:
        tensor: Any = number.args[0]
        value = tensor.meta["val"]
        if value.dim():
            tensor = insert(number, aten.view.default, tensor, [])
        wide = torch.float64 if value.dtype.is_floating_point else torch.int64
        if value.dtype not in (torch.bool, wide):
            tensor = insert(number, aten._to_copy.default, tensor, dtype=wide)
        done[number] = tensor
        return done[number]
    numbers = [part for part in number.args if isinstance(part, fx.Node)]
    tensors = {part: _converted(part, done) for part in numbers}
    like = tensors[numbers[0]]
    parts = [
        tensors[part]
        if isinstance(part, fx.Node)
        else insert(number, aten.full_like.default, like, part, dtype=_DTYPES[type(part)])
        for part in number.args
    ]
    done[number] = insert(number, _SAME[number.target], *parts)
    return done[number]
