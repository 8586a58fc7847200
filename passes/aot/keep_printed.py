"""Print a tensor once, and keep the result of the print for the backward pass.

Before   %p = ipu.print_tensor(%x: f32[n], "x", True, ...)
After    the same
         %p  with meta["recompute"] = CheckpointPolicy.MUST_SAVE
Keeps    the graph.
Source   `torch.utils.checkpoint`, CheckpointPolicy.
"""

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ipu_dynamo.ops.marks.print_tensor import print_tensor_op
from ipu_dynamo.ops.private.node_meta import POLICY
from ipu_dynamo.passes.kit import GraphPass


class KeepPrinted(GraphPass):
    """The pass, on a joint graph that is to be cut in two."""

    level = "joint"
    acts_on = (print_tensor_op,)
    needed = "the backward pass would print again"

    def plan(self, graph: fx.Graph) -> list[fx.Node]:
        """Find the prints that backward might repeat. Reads the graph only."""
        prints = graph.find_nodes(op="call_function", target=print_tensor_op)
        return [node for node in prints if node.meta.get(POLICY) is not CheckpointPolicy.MUST_SAVE]

    def apply(self, graph: fx.Graph, node: fx.Node) -> None:
        node.meta[POLICY] = CheckpointPolicy.MUST_SAVE
