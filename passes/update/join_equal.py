"""Compute equal operators once, as parameters of a group compute the same of its numbers.

Before   %a = aten.rsub(%beta, 1);   %b = aten.rsub(%beta, 1);   %y = aten.mul(%g, %b)
After    %a = aten.rsub(%beta, 1);   %y = aten.mul(%g, %a)
Keeps    every result. Operators that draw random numbers are not joined.
Source   common-subexpression elimination.
"""

from torch import fx

from ipu_dynamo.ops.graph_queries import may_draw
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update.step_graphs import each_step
from ipu_dynamo.passes.update_levels import UpdateGraphs, UpdateStep


def _join(step: UpdateStep) -> bool:
    graph, changed = step.graph.graph, False
    known: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if may_draw(node):
            continue
        text = f"{node.target} {node.args} {node.kwargs}"
        if known.setdefault(text, node) is not node:
            node.replace_all_uses_with(known[text])
            graph.erase_node(node)
            changed = True
    return changed


class JoinEqual(Pass):
    """The pass."""

    level = "update"

    def __call__(self, update: UpdateGraphs) -> bool:
        return each_step(update, _join)
