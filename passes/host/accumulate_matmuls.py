"""Add products, and rows of tables, to the accumulators of gradients as soon as they are there.

Before   %p = aten.mm(%a, %b);  ...;  %e = aten.embedding_dense_backward(%rows, %tokens, ...)
         aten.add_(%w_grad, aten.add(aten.t(aten.t(%p)), %e))
After    ipu.accumulate_product(%w_grad, True, %a, %b);  ...
         ipu.accumulate_rows(%w_grad, %tokens, %rows)
Keeps    shapes, dtypes, source lines; values up to the order of one sum. No gradient exists beside
         its accumulator, which is read and written once, and a tied table's first contribution is
         not kept until the last one is there.
Source   the `beta` of BLAS's `gemm`, which adds to a matrix what it computes.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ipu_dynamo.ops.accumulate import accumulate_product
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.graph.gradient_sums import (
    add_rows,
    alike,
    erase_unread,
    is_table,
    sum_of,
    turns,
)
from ipu_dynamo.passes.levels import Level, Partitioned

aten = torch.ops.aten
# Elements of an accumulator, from which a pass over its memory takes longer than calling one more
# operator. A step that stores its gradients and is small becomes one function as it is.
_WORTH_ADDING, _WORTH_STORING = 2**15, 2**17
_FEW = 8  # times as many elements as the rows that are added to it has a table at least
_TYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Term:
    """A contribution to a gradient.

    Args:
        node: what is added.
        product: the product that it is, perhaps turned, if that can be added itself.
        turned: the accumulator has the dimensions of `product` in the other order.
    """

    node: fx.Node
    product: fx.Node | None = None
    turned: bool = False

    @property
    def is_rows(self) -> bool:
        """Whether it is a table with few rows that are not zero, which can be added themselves."""
        if not is_table(self.node):
            return False
        gradient = self.node.args[0]
        assert isinstance(gradient, fx.Node)
        return bool(gradient.meta["val"].numel() * _FEW <= self.node.meta["val"].numel())


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A gradient that can be added to, or stored in, its accumulator term by term.

    Args:
        write: stores or adds the sum.
        terms: of the sum, in the order in which autograd adds them.
        sums: the additions, the last one first.
    """

    write: fx.Node
    terms: tuple[Term, ...]
    sums: tuple[fx.Node, ...]

    @property
    def total(self) -> fx.Node:
        """The accumulator."""
        total = self.write.args[0]
        assert isinstance(total, fx.Node)
        return total

    @property
    def adds(self) -> bool:
        """Whether the sum is added, and not stored."""
        return self.write.target is aten.add_.Tensor


def plan(graph: fx.Graph) -> tuple[Accumulation, ...]:
    """The accumulations of a part's graph that are worth it. Reads the graph only."""
    found = []
    for write in graph.nodes:
        if write.target not in (aten.copy_.default, aten.add_.Tensor) or not _is_large(write):
            continue
        nodes, sums = sum_of(write, write.args[1])
        one = Accumulation(write, tuple(map(_term, nodes)), tuple(sums))
        products = any(term.product is not None for term in one.terms)
        if products or (one.adds and any(term.is_rows for term in one.terms)):
            found.append(one)
    return tuple(found)


def _is_large(write: fx.Node) -> bool:
    """Whether a node writes to a large accumulator that is written only."""
    total = write.args[0]
    if not isinstance(total, fx.Node) or total.op != "placeholder" or write.users or write.kwargs:
        return False
    value = total.meta["val"]
    only_written = all(user.args[0] is total and writes(user) for user in total.users)
    least = _WORTH_ADDING if write.target is aten.add_.Tensor else _WORTH_STORING
    fits = value.dtype in _TYPES and value.dim() == 2 and value.numel() >= least
    fits = fits and alike(total, write.all_input_nodes[1])
    return only_written and fits


def _term(node: fx.Node) -> Term:
    turned, source = False, node
    while turns(source) and len(source.users) == 1:
        turned = not turned
        source = source.args[0]  # type: ignore[assignment]
    product = source.target is aten.mm.default and len(source.users) == 1
    return Term(node, source, turned) if product else Term(node)


def apply(graph: fx.Graph, one: Accumulation) -> None:
    """Write each product where it is made, the other terms where the sum was written."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    products = [term for term in one.terms if term.product is not None]
    adds = one.adds
    for term in sorted(products, key=lambda term: order[term.product]):
        _add_product(graph, one.total, term, adds=adds)
        adds = True
    with graph.inserting_before(one.write):
        for term in one.terms:
            if term.product is None:
                _add(graph, one.total, term, origin=one.write)
    graph.erase_node(one.write)
    for node in (*one.sums, *(term.node for term in one.terms)):
        erase_unread(node)


def _add_product(graph: fx.Graph, total: fx.Node, term: Term, *, adds: bool) -> None:
    assert term.product is not None
    a, b = term.product.args
    with graph.inserting_before(term.product):
        if term.turned:
            a, b = (call(graph, aten.t.default, n, origin=term.product) for n in (b, a))
        call(graph, accumulate_product, total, adds, a, b, origin=term.product)


def _add(graph: fx.Graph, total: fx.Node, term: Term, *, origin: fx.Node) -> None:
    if term.is_rows:
        add_rows(graph, total, term.node, origin=origin)
    else:
        call(graph, aten.add_.Tensor, total, term.node, origin=origin)


@dataclass(frozen=True)
class AccumulateMatmuls:
    """The pass."""

    name: ClassVar[str] = "AccumulateMatmuls"
    level: ClassVar[Level] = "parts"

    def __call__(self, partitioned: Partitioned) -> bool:
        changed = False
        for part in partitioned.parts:
            accumulations = plan(part.graph.graph)
            for one in accumulations:
                apply(part.graph.graph, one)
            if accumulations:
                part.graph.recompile()
                changed = True
        return changed
