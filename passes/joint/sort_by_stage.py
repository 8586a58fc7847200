"""Order operators by when their stages run, so that each stage's are in a row.

Before   %a = aten.relu(%x: f32[n])  in stage 0, forward
         %b = aten.exp(%a)           in stage 1, forward
         %c = aten.tan(%a)           in stage 0, forward
         capture.ipus = {0: 0, 1: 1}
After    %a = aten.relu(%x)          in stage 0, forward
         %c = aten.tan(%a)           in stage 0, forward
         %b = aten.exp(%a)           in stage 1, forward
         return (%b, %c)
Keeps    the operators, and their order within a stage and direction.
Source   design of this project: branches whose stages were given by name mix in the graph's order.
"""

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Joint
from ipu_dynamo.passes.joint.assign_gradient_stages import slot
from ipu_dynamo.passes.kit import GraphPass


def plan(capture: Joint) -> list[fx.Node]:
    """The operators in their new order."""
    stages = max(capture.ipus) + 1
    operators = [n for n in capture.graph.graph.nodes if n.op not in ("placeholder", "output")]
    return sorted(
        operators,
        key=lambda n: slot(n.meta[STAGE], n.meta[BACKWARD], stages, joined=capture.joined),
    )


class SortByStage(GraphPass):
    """The pass. No operator reads the result of a later stage: `AssignGradientStages` saw to it."""

    level = "joint"

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        before = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        operators = plan(capture)
        if operators == before:
            return False
        for node in operators:
            capture.output_node.prepend(node)
        return True
