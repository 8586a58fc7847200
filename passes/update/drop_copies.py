"""Read the source of a copy: nothing in the graph writes.

Before   %c = aten.clone(%x);   %y = aten.mul(%c, %g)
After    %y = aten.mul(%x, %g)
Keeps    every result. A copy to another dtype, shape or device stays.
Source   the copies that functionalisation writes for `copy_`.
"""

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update.step_graphs import each_step
from ipu_dynamo.passes.update_levels import UpdateGraphs, UpdateStep


def _drop(step: UpdateStep) -> bool:
    graph, changed = step.graph.graph, False
    for node in list(graph.nodes):
        if node.target is aten.copy.default:
            source = node.args[1]
        elif node.target is aten.clone.default and not node.kwargs:
            source = node.args[0]
        else:
            continue
        before, after = source.meta["val"], node.meta["val"]
        kinds = [(value.dtype, value.shape, value.device) for value in (before, after)]
        if kinds[0] == kinds[1]:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            changed = True
    return changed


class DropCopies(Pass):
    """The pass."""

    level = "update"

    def __call__(self, update: UpdateGraphs) -> bool:
        return each_step(update, _drop)
