"""Compute with tensors instead of numbers read from a tensor's values, if shapes allow it.

Before   %u = aten._local_scalar_dense(%x: i32[])
         %y = aten.scalar_tensor(%u, dtype=torch.float64)
         return (%y,)  with meta["desc"] = [PlainAOTOutput(0)]
After    %y = aten._to_copy(%x, dtype=torch.float64)
Before   %y = aten._local_scalar_dense(%x: i64[])  # a number is returned
         return (%y,)  with meta["desc"] = [PlainAOTOutput(0)]
After    return (%x,)                              # the caller reads it
Before   %y = aten.sum(aten.index(%x: f32[m,n], [%k: b8[m]]), [0], True)
         return (%y,)  with meta["desc"] = [PlainAOTOutput(0)]
After    %h = aten.logical_not(aten.unsqueeze(%k, -1))
         %y = aten.view(aten.sum(aten.masked_fill(%x, %h, 0), [0]), [1, n])
Before   %i, _ = aten._unique(%k: i64[n])          # index_fill writes each element once
         %y = aten.sum(aten.index_select(%x: f32[n,m], 0, %i), [0])
         return (%y,)  with meta["desc"] = [PlainAOTOutput(0)]
After    %all = aten.ones_like(%x, dtype=torch.bool)
         %h = aten.index_fill(%all, 0, %k, False)
         %y = aten.view(aten.sum(aten.masked_fill(%x, %h, 0), [0]), [m])
Keeps    values up to the order of a sum, shapes, dtypes, source lines.
Source   programs have static shapes, and no value of a tensor decides what runs.

The first case is a number of the model (`x.item()`) that becomes a tensor again. The second is a
number that the model returns, or the place where a result is cut from an input. The others are
gradients of one value that `x[mask] = value` or `index_fill` writes to many places.
"""

import operator
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.capture.private.dynamo import is_read_number
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.aot.select_by_indices import (
    erase_unused,
    insert,
    model_results,
    number_as_tensor,
    returned_cut,
    start_of_cut,
)
from ipu_dynamo.passes.kit import GraphPass


class AvoidReadingValues(GraphPass):
    """The pass. Other reads of values are refused later."""

    level = "joint"

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        changed = False
        for node in graph.find_nodes(op="call_function", target=aten.scalar_tensor.default):
            changed |= _keep_as_tensor(node)
        for target in (aten.sum.default, aten.sum.dim_IntList):
            for node in graph.find_nodes(op="call_function", target=target):
                changed |= _sum_under_mask(node)
        changed |= _return_tensors(graph)
        return changed


def _keep_as_tensor(node: fx.Node) -> bool:
    """Convert the tensor that was read as a number, in place of making a tensor of the number."""
    read = node.args[0]
    if not isinstance(read, fx.Node) or read.target is not aten._local_scalar_dense.default:
        return False
    number: Any = read.args[0]
    if number.meta["val"].dim():
        number = insert(node, aten.view.default, number, [])
    dtype = node.meta["val"].dtype
    node.replace_all_uses_with(insert(node, aten._to_copy.default, number, dtype=dtype))
    erase_unused(node)
    return True


def _sum_under_mask(node: fx.Node) -> bool:
    """Sum only the selected elements."""
    selected: Any = node.args[0]
    dims = _dims(node)
    if selected.target is aten.index.Tensor:
        source, indices = selected.args
        first, mask = next((i, index) for i, index in enumerate(indices) if index is not None)
        alone = len(indices) == first + 1 and mask.meta["val"].dtype == torch.bool
        if not alone or first not in dims:
            return False
        extra = mask.meta["val"].dim() - 1  # one dim of selected elements is so many more here
        dims = [
            *(dim if dim < first else dim + extra for dim in dims if dim != first),
            *range(first, first + extra + 1),
        ]
        for _ in range(source.meta["val"].dim() - first - extra - 1):
            mask = insert(node, aten.unsqueeze.default, mask, -1)
        hidden = insert(node, aten.logical_not.default, mask)
    elif selected.target is aten.index_select.default and _is_unique(selected.args[2]):
        source, dim, unique = selected.args
        if source.meta["val"].dim() and dim % source.meta["val"].dim() not in dims:
            return False
        all_hidden = insert(node, aten.ones_like.default, source, dtype=torch.bool)
        indices = unique.args[0].args[0]
        hidden = insert(node, aten.index_fill.int_Scalar, all_hidden, dim, indices, False)
    else:
        return False
    shown = insert(node, aten.masked_fill.Scalar, source, hidden, 0)
    options = {"dtype": node.kwargs["dtype"]} if "dtype" in node.kwargs else {}
    total = insert(node, aten.sum.dim_IntList, shown, dims, **options)
    total = insert(node, aten.view.default, total, list(node.meta["val"].shape))
    node.replace_all_uses_with(total)
    erase_unused(node)
    return True


def _dims(node: fx.Node) -> list[int]:
    """The dims that `node`, a sum, removes from its argument."""
    summed, reduced, *_ = (*node.args, None)
    assert isinstance(summed, fx.Node)
    rank = max(1, summed.meta["val"].dim())
    dims: Any = reduced or range(rank)
    return [dim % rank for dim in dims]


def _is_unique(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    source: Any
    source, position = node.args
    return bool(position == 0 and source.target is aten._unique.default)


def _return_tensors(graph: fx.Graph) -> bool:
    """Return the tensors of numbers that are results, and where results are cut from inputs."""
    tensors: dict[fx.Node, fx.Node] = {}
    places = model_results(graph)
    for result in dict.fromkeys(node for _, node in places):
        if is_read_number(result.meta.get("val")):
            if (tensor := number_as_tensor(result)) is not None:
                tensors[result] = tensor
        elif returned_cut(result) is not None:
            tensors[result] = start_of_cut(result)
    returned = list(graph.output_node().args[0])  # type: ignore[arg-type]
    for place, result in places:
        returned[place] = tensors.get(result, result)
    graph.output_node().args = (returned,)
    for result in tensors:
        _drop_bounds(result)
        erase_unused(result)
    return bool(tensors)


def _drop_bounds(number: fx.Node) -> None:
    """Erase PyTorch's checks that a truth value, as a number, is from 0 to 1."""
    if not isinstance(number.meta["val"], torch.SymBool):
        return
    for as_number in [user for user in number.users if user.target is torch.sym_ite]:
        if as_number.args != (number, 1, 0):
            continue
        for bound in list(as_number.users):
            checks = list(bound.users)
            holds = bound.args[1:] == ((0,) if bound.target is operator.ge else (1,))
            is_check = all(check.target is aten._assert_scalar.default for check in checks)
            if bound.target in (operator.ge, operator.le) and holds and is_check:
                for node in (*checks, bound):
                    bound.graph.erase_node(node)
        if not as_number.users:
            as_number.graph.erase_node(as_number)
