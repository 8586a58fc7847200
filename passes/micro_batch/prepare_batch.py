"""Rewrite operators without a micro-batch form into operators that have one.

Before   %z = aten.new_zeros(%x: f32[m,n], [m, 3])
After    %z = aten.full([m, 3], 0, dtype=torch.float32, device=torch.device("cpu"))
Before   %y = aten.max(%x: f32[m,n])
After    %y = aten.amax(aten.amax(%x, [1]), [0])   # so that only one value of each row is kept
Before   %l = aten.nll_loss_forward(%s: f32[m,n], %t: i64[m], None, 1, -100)
         %y = %l[0]
After    %l = aten.nll_loss_forward(%s, %t, None, 2, -100)
         %sum = %l[0]
         %weight = %l[1]
         %y = aten.div(%sum, %weight)
Keeps    values: a mean of cross entropy divides by the weight of the whole batch's targets.
Source   PyTorch, `nll_loss`: a mean is the sum, divided by the weight of the targets that count.
"""

import operator
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.passes.micro_batch.batch_table import MEAN, SUM

_HALVES = (torch.float16, torch.bfloat16)
_FILLED: dict[object, Any] = {
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_empty.default: 0,
    aten.new_empty_strided.default: 0,
    aten.new_full.default: None,  # its value is an argument
}
_EXTREMES = {
    aten.max.default: aten.amax.default,
    aten.min.default: aten.amin.default,
    aten.any.default: aten.any.dims,
    aten.all.default: aten.all.dims,
}
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


class PrepareBatch(GraphPass):
    """The pass."""

    level = "joint"
    needed = "these operators have no micro-batch form of their own"

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        filled = [n for n in graph.nodes if n.target in _FILLED and n.meta["val"].is_contiguous()]
        losses = [node for node in graph.nodes if node.target in _LOSSES and node.args[3] == MEAN]
        extremes = [n for n in graph.nodes if n.target in _EXTREMES and n.args[0].meta["val"].dim()]
        for node in filled:
            _make_constant(graph, node)
        for node in extremes:
            _reduce_rows_first(graph, node)
        for node in losses:
            _sum_up(graph, node)
        return bool(filled or extremes or losses)


def _make_constant(graph: fx.Graph, node: fx.Node) -> None:
    """Replace `new_zeros` and its like: they need their tensor only for dtype and device."""
    value, fill = node.meta["val"], _FILLED[node.target]
    if fill is None:
        fill = node.args[2]
    like = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_after(node):
        constant = call(graph, aten.full.default, list(value.shape), fill, origin=node, **like)
    node.replace_all_uses_with(constant)
    graph.erase_node(node)


def _reduce_rows_first(graph: fx.Graph, node: fx.Node) -> None:
    """Reduce over the other dimensions, and then over the first one."""
    target, rows = _EXTREMES[node.target], node.args[0]
    assert isinstance(rows, fx.Node)
    first, *others = range(rows.meta["val"].dim())
    with graph.inserting_before(node):
        if others:
            rows = call(graph, target, rows, others, origin=node)
        whole = call(graph, target, rows, [first], origin=node)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


def _sum_up(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a mean over the targets that count by a sum, which their weight divides."""
    args: list[Any] = [SUM if i == 3 else arg for i, arg in enumerate(node.args)]
    dtype = args[0].meta["val"].dtype
    to = aten._to_copy.default
    with graph.inserting_before(node.next):
        if dtype in _HALVES:  # whose sums would overflow
            for i in (0, 2):
                if isinstance(args[i], fx.Node):
                    args[i] = call(graph, to, args[i], origin=node, dtype=torch.float32)
        both = call(graph, node.target, *args, origin=node)
        total, weight = (call(graph, operator.getitem, both, i, origin=node) for i in (0, 1))
        mean = call(graph, aten.div.Tensor, total, weight, origin=node)
        if dtype in _HALVES:
            mean = call(graph, to, mean, origin=node, dtype=dtype)
            weight = call(graph, to, weight, origin=node, dtype=dtype)
    for user in list(node.users):
        user.replace_all_uses_with(mean if user.args[1] == 0 else weight)
        graph.erase_node(user)
    graph.erase_node(node)
