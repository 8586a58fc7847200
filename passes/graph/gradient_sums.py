"""Take the sums of gradients apart, which autograd makes where a tensor is read several times.

If an accumulator is large, the operator of a term adds the term itself: a matrix product, the rows
of a table, the loop of a serialised loss.
"""

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.accumulate import accumulate_rows
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.ops.private.graphs import is_erased
from ipu_dynamo.ops.serialized_loss import serialized_loss_backward
from ipu_dynamo.passes.graph.builder import call

# Elements of an accumulator, from which a pass over its memory takes longer than calling one more
# operator. Programs are split by these, so they are no costs of one machine.
WORTH_ADDING, WORTH_STORING = 2**15, 2**17
_FEW = 8  # times as many elements as the rows that are added to it has a table at least
_TYPES = (torch.float32, torch.float64)


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
    value = node.meta["val"]
    return all(isinstance(term, fx.Node) and alike(term.meta["val"], value) for term in node.args)


def alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two values have one shape and one dtype."""
    return bool(tensor.shape == other.shape and tensor.dtype == other.dtype)


def is_large(total: Tensor, rule: str) -> bool:
    """Whether an accumulator is large enough that the operator of a term should store or add it."""
    least = WORTH_STORING if rule == "store" else WORTH_ADDING
    return is_matrix(total) and total.numel() >= least


def is_matrix(total: Tensor) -> bool:
    """Whether the operator of a term can store it, or add it."""
    return total.dtype in _TYPES and total.dim() == 2


def untransposed(term: fx.Node) -> tuple[fx.Node, bool]:
    """The matrix that only `term` reads as transposed, and whether it is; else `term` itself."""
    transposed = False
    while transposes(term) and len(term.users) == 1:
        transposed = not transposed
        term = term.args[0]  # type: ignore[assignment]
    return term, transposed


def matmul_of(term: fx.Node) -> fx.Node | None:
    """The product of matrices that a term is, perhaps transposed, if nothing else reads that."""
    source, _ = untransposed(term)
    return source if source.target is aten.mm.default and len(source.users) == 1 else None


def loop_of(term: fx.Node) -> fx.Node | None:
    """The loop of a serialised loss that makes a term, if nothing else reads that."""
    source, _ = untransposed(term)
    if source.target is not getitem or source.args[1] != 1 or len(source.users) != 1:
        return None
    loop = source.args[0]
    assert isinstance(loop, fx.Node)
    return loop if loop.target is serialized_loss_backward else None


def transposes(node: fx.Node) -> bool:
    """Whether an operator transposes a matrix: `transpose(x, 1, -1)` does not."""
    if node.target not in (aten.t.default, aten.transpose.int) or node.meta["val"].dim() != 2:
        return False
    if node.target is aten.t.default:
        return True
    first, second = node.args[1:3]
    assert isinstance(first, int)
    assert isinstance(second, int)
    return (first - second) % 2 == 1


def is_table(node: fx.Node) -> bool:
    """Whether a node computes an embedding's gradient, whose rows can be added separately."""
    return node.target is aten.embedding_dense_backward.default and not node.args[4]


def rows_are_few(node: fx.Node) -> bool:
    """Whether a node computes an embedding's gradient with few rows that are not zero."""
    if not is_table(node):
        return False
    gradient = node.args[0]
    assert isinstance(gradient, fx.Node)
    return bool(gradient.meta["val"].numel() * _FEW <= node.meta["val"].numel())


def adds_in_order(node: fx.Node) -> bool:
    """Whether rows are added in a fixed order here: only the CPU does."""
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
    """Erase a node without readers, and then the nodes that only it read."""
    pending = [node]
    while pending:
        node = pending.pop()
        if is_erased(node) or node.users or node.op != "call_function" or writes(node):
            continue
        pending += reversed(node.all_input_nodes)
        node.graph.erase_node(node)
