"""Let the loop of a serialised loss write the weight's gradient where it is accumulated.

Before   %dx, %dw = ipu.serialized_loss_backward(...);  aten.add_(%w_grad, %dw');
         aten.add_(%w_grad, %embedding_gradient)
After    %dx = ipu.serialized_loss_backward_(..., %w_grad, True, True)
         ipu.accumulate_rows(%w_grad, %tokens, %rows)
Keeps    shapes, dtypes, source lines; values up to the order of one sum. No gradient of the weight
         exists besides the accumulator, and a tied embedding adds only the rows that it read.
Source   PopTorch user guide, "poptorch.serializedMatMul": weights are updated part by part.
"""

from dataclasses import dataclass

from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.serialized_loss import serialized_loss_backward, serialized_loss_backward_
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.graph.gradient_sums import (
    add_rows,
    adds_in_order,
    erase_unread,
    is_table,
    loop_of,
    untransposed,
)
from ipu_dynamo.passes.host.functions.rewrite_functions import rewrite_functions
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import Decision, HostProgram


@dataclass(frozen=True, slots=True)
class LoopAccumulation:
    """A gradient whose first term a loop can write.

    Args:
        write: stores the term in its accumulator, or adds it.
        loop: computes it.
        transposed: the accumulator has its dimensions in the other order.
        tables: later writes, of the gradient of an embedding.
    """

    write: fx.Node
    loop: fx.Node
    transposed: bool
    tables: tuple[fx.Node, ...]


def plan(graph: fx.Graph) -> tuple[LoopAccumulation, ...]:
    """The accumulations of a function that loops can do."""
    accumulations = []
    order = {node: place for place, node in enumerate(graph.nodes)}
    for total in graph.find_nodes(op="placeholder"):
        writes = sorted(total.users, key=order.__getitem__)
        if not writes or not all(_writes_only(write, total) for write in writes):
            continue
        first, *others = writes
        term = first.args[1]
        assert isinstance(term, fx.Node)
        loop = loop_of(term) if len(term.users) == 1 else None
        if loop is not None:
            tables = tuple(write for write in others if _is_table(write.args[1]))
            accumulations.append(LoopAccumulation(first, loop, untransposed(term)[1], tables))
    return tuple(accumulations)


def _writes_only(write: fx.Node, total: fx.Node) -> bool:
    plain = write.target in (aten.copy_.default, aten.add_.Tensor) and not write.users
    return plain and write.args[0] is total and write.args[1] is not total


def _is_table(term: object) -> bool:
    assert isinstance(term, fx.Node)
    return is_table(term) and adds_in_order(term)


def apply(graph: fx.Graph, accumulation: LoopAccumulation) -> None:
    """Give the accumulator to the loop."""
    total, term = accumulation.write.args[:2]
    assert isinstance(total, fx.Node)
    assert isinstance(term, fx.Node)
    adds = accumulation.write.target is aten.add_.Tensor
    with graph.inserting_before(accumulation.loop):
        arguments = (*accumulation.loop.args, total, accumulation.transposed, adds)
        of_x = call(graph, serialized_loss_backward_, *arguments, origin=accumulation.loop)
    for item in list(accumulation.loop.users):
        if item.args[1] == 0:
            item.replace_all_uses_with(of_x)
    for write in accumulation.tables:
        table = write.args[1]
        assert isinstance(table, fx.Node)
        with graph.inserting_before(write):
            add_rows(graph, total, table, origin=write)
        graph.erase_node(write)
        erase_unread(table)
    graph.erase_node(accumulation.write)
    erase_unread(term)
    for node in (*accumulation.loop.users, accumulation.loop):
        erase_unread(node)


class AccumulateInLoop(Pass):
    """The pass. `forced`: whether to, where it can be."""

    level = "host"
    acts_on = (serialized_loss_backward,)
    choices = (True, False)

    forced: bool | None = None

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        if self.forced is False:
            return False
        decision = Decision(self.name, "written where they are added", of="gradients of loops")
        return rewrite_functions(host, _rewrite, plan, decision)


def _rewrite(graph: fx.Graph) -> None:
    for accumulation in plan(graph):
        apply(graph, accumulation)
