"""Let recurrent layers save nothing that no backward operator reads.

Before   %l = ipu.lstm(%x: f32[m,n,k], %h: f32[n,k], %c: f32[n,k], %v: f32[4*k,k], %w: f32[4*k,k],
                       None, None, None, None, False, True)
         %y = %l[0]
After    %l = ipu.lstm(%x, %h, %c, %v, %w, None, None, None, None, False, False)
         %y = %l[0]
Keeps    every value that is read; stages and source lines.
Source   dead code elimination, of results that an argument asks for.

A layer saves its gates if gradients are on when it is called. They have no readers if nothing that
the layer depends on is trained, or if the backward pass computes all of it again.
"""

from torch import fx

from ipu_dynamo.ops.recurrent.pairs import SAVED
from ipu_dynamo.passes.graph.builder import evaluate
from ipu_dynamo.passes.kit import GraphPass


class DropUnreadGates(GraphPass):
    """The pass."""

    level = "joint"
    acts_on = tuple(SAVED)

    def plan(self, graph: fx.Graph) -> list[fx.Node]:
        """Find the layers that save unread gates. Reads the graph only."""
        return [
            node
            for node in graph.nodes
            if node.target in SAVED
            and node.args[-1] is True
            and not any(part.users for part in node.users if part.args[1] in SAVED[node.target])
        ]

    def apply(self, graph: fx.Graph, node: fx.Node) -> None:
        for part in list(node.users):
            if part.args[1] in SAVED[node.target]:
                graph.erase_node(part)
        node.args = (*node.args[:-1], False)
        node.meta["val"] = evaluate(node)
