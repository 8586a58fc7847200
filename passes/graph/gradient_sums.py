"""Take the sums of gradients apart, which autograd makes where a tensor is read several times."""

from typing import Any

import torch
from torch import fx

from ipu_dynamo.ops.accumulate import accumulate_rows
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.passes.graph.builder import call

aten = torch.ops.aten


def sum_of(reader: fx.Node, node: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    """The terms of a sum that only `reader` reads, and its additions, the last one first."""
    terms, sums = [], []
    pending = [(reader, node)]  # a tensor that is read a thousand times has as long a chain
    while pending:
        reader, node = pending.pop()
        if _adds(node, reader):
            sums.append(node)
            pending += [(node, argument) for argument in reversed(node.args)]
        else:
            terms.append(node)
    return terms, sums


def _adds(node: fx.Node, reader: fx.Node) -> bool:
    """Whether `node` is a sum of two like itself, which only `reader` reads."""
    if node.target is not aten.add.Tensor or list(node.users) != [reader] or node.kwargs:
        return False
    return all(isinstance(one, fx.Node) and alike(one, node) for one in node.args)


def alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values have one shape and one dtype."""
    one, other = a.meta["val"], b.meta["val"]
    return bool(one.shape == other.shape and one.dtype == other.dtype)


def turns(node: fx.Node) -> bool:
    """Whether an operator turns a matrix: `transpose(x, 1, -1)` does not."""
    if node.target not in (aten.t.default, aten.transpose.int) or node.meta["val"].dim() != 2:
        return False
    if node.target is aten.t.default:
        return True
    first, second = node.args[1:3]
    assert isinstance(first, int)
    assert isinstance(second, int)
    return (first - second) % 2 == 1


def is_table(node: fx.Node) -> bool:
    """Whether a gradient is that of an embedding, whose rows can be added by themselves. Where
    other devices than the CPU do that, the order of the sums is not fixed."""
    if node.target is not aten.embedding_dense_backward.default or node.args[4]:
        return False
    return bool(node.meta["val"].device.type == "cpu")


def add_rows(graph: fx.Graph, total: fx.Node, table: fx.Node, *, origin: fx.Node) -> None:
    """Add the gradient of an embedding: the rows that are not zero."""
    gradient, indices, _, padding, _ = table.args
    assert isinstance(gradient, fx.Node)
    width = gradient.meta["val"].shape[-1]
    rows = call(graph, aten.reshape.default, gradient, [-1, width], origin=table)
    tokens = call(graph, aten.reshape.default, indices, [-1], origin=table)
    if padding != -1:
        padded = call(graph, aten.eq.Scalar, tokens, padding, origin=table)
        padded = call(graph, aten.unsqueeze.default, padded, 1, origin=table)
        rows = call(graph, aten.masked_fill.Scalar, rows, padded, 0, origin=table)
    call(graph, accumulate_rows, total, tokens, rows, origin=origin)


def erase_unread(node: fx.Node) -> None:
    """Erase a node that nobody reads, and then what only it read."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node._erased or node.users or node.op != "call_function" or writes(node):
            continue
        pending += reversed(node.all_input_nodes)
        node.graph.erase_node(node)
