"""Let the loop of a serialised loss write the weight's gradient where it is accumulated.

Before   %dx, %dw = ipu.serialized_loss_backward(...);  %g = aten.add(%dw', %embedding_gradient)
         aten.add_(%w_grad, %g)
After    %dx = ipu.serialized_loss_backward_(..., %w_grad, True, True)
         ipu.accumulate_rows(%w_grad, %tokens, %rows)
Keeps    shapes, dtypes, source lines; values up to the order of one sum. No gradient of the weight
         exists beside the accumulator, and a tied embedding adds only the rows that it read.
Source   PopTorch user guide, "poptorch.serializedMatMul": weights are updated part by part.
"""

from dataclasses import dataclass
from operator import getitem
from typing import ClassVar

import torch
from torch import fx

from ipu_dynamo.ops.serialized_loss import serialized_loss_backward, serialized_loss_backward_
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.graph.gradient_sums import add_rows, erase_unread, is_table, sum_of, turns
from ipu_dynamo.passes.levels import Level, Partitioned

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A gradient with a part that a loop can write.

    Args:
        write: stores the gradient in its accumulator, or adds it.
        term: the part.
        loop: computes it.
        turned: the accumulator has its dimensions in the other order.
        others: the other terms, in the order in which autograd adds them.
        sums: the additions, the last one first.
    """

    write: fx.Node
    term: fx.Node
    loop: fx.Node
    turned: bool
    others: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]


def plan(graph: fx.Graph) -> tuple[Accumulation, ...]:
    """The accumulations of a part's graph that loops can do."""
    found = []
    for node in graph.nodes:
        if node.target in (aten.copy_.default, aten.add_.Tensor) and _is_accumulator(node.args[0]):
            terms, sums = sum_of(node, node.args[1])
            once = [term for term in terms if terms.count(term) == 1]
            loops = [(term, *_loop_of(term)) for term in once]
            ready = [(t, loop, turned) for t, loop, turned in loops if loop is not None]
            if ready:
                term, loop, turned = ready[0]
                others = tuple(t for t in terms if t is not term)
                found.append(Accumulation(node, term, loop, turned, others, tuple(sums)))
    return tuple(found)


def _is_accumulator(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and len(node.users) == 1


def _loop_of(term: fx.Node) -> tuple[fx.Node | None, bool]:
    """The loop that makes `term`, if nothing else reads that; and whether `term` is turned."""
    turned = False
    while turns(term) and len(term.users) == 1:
        turned = not turned
        term = term.args[0]  # type: ignore[assignment]
    if term.target is not getitem or term.args[1] != 1 or len(term.users) != 1:
        return None, turned
    loop = term.args[0]
    assert isinstance(loop, fx.Node)
    return (loop if loop.target is serialized_loss_backward else None), turned


def apply(graph: fx.Graph, one: Accumulation) -> None:
    """Give the accumulator to the loop; add the other terms where the sum was written."""
    total = one.write.args[0]
    assert isinstance(total, fx.Node)
    adds = one.write.target is aten.add_.Tensor
    with graph.inserting_before(one.loop):
        given = (*one.loop.args, total, one.turned, adds)
        of_x = call(graph, serialized_loss_backward_, *given, origin=one.loop)
    for item in list(one.loop.users):
        if item.args[1] == 0:
            item.replace_all_uses_with(of_x)
    with graph.inserting_before(one.write):
        for term in one.others:
            if is_table(term):
                add_rows(graph, total, term, origin=one.write)
            else:
                call(graph, aten.add_.Tensor, total, term, origin=one.write)
    graph.erase_node(one.write)
    for node in (*one.sums, *one.others, one.term):
        erase_unread(node)
    for node in (*one.loop.users, one.loop):
        erase_unread(node)


@dataclass(frozen=True)
class AccumulateInLoop:
    """The pass."""

    name: ClassVar[str] = "AccumulateInLoop"
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
