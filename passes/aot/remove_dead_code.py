"""Remove operators without readers, and marks for recomputation on them.

Before   %d, _ = aten.native_dropout(%x: f32[n], 0.5, True)
         ipu.recomputation_checkpoint(%d)
         %y = aten.relu(%x)
         return (%y,)
After    %y = aten.relu(%x)
Keeps    operators with an effect. An operator that only draws random numbers has none, and a mark
         alone does not keep it: its draws would count, and change the numbers of others.
Source   `torch.fx.Graph.eliminate_dead_code`.
"""

from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.graph_queries import needed_for
from ipu_dynamo.ops.marks.markers import recomputation_checkpoint_op
from ipu_dynamo.passes.kit import GraphPass


class RemoveDeadCode(GraphPass):
    """The pass."""

    level = "joint"

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        marks = idle_marks(graph)
        for mark in marks:
            graph.erase_node(mark)
        return graph.eliminate_dead_code(_has_effects) or bool(marks)


def idle_marks(graph: fx.Graph) -> list[fx.Node]:
    """The marks on values that nothing else needs. Reads the graph only."""
    marks = list(graph.find_nodes(op="call_function", target=recomputation_checkpoint_op))
    needed = set(filter(_has_effects, graph.nodes)).difference(marks)
    needed = needed_for([*needed, graph.output_node()])
    return [mark for mark in marks if mark.args[0] not in needed]


def _has_effects(node: fx.Node) -> bool:
    """Whether a node stays even if it has no readers."""
    return node.is_impure(impure_random=False)
