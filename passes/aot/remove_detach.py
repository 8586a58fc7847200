"""Let readers of a detach read its source: after autograd nothing is differentiated any more.

Before   %d = aten.detach(%x: f32[n])
         %y = aten.sub(%d, %w: f32[n])
After    %y = aten.sub(%x, %w)
Keeps    values. Where the caller wants aliases, returned values stay: a detached output must not be
         the same tensor as its source.
Source   `torch.Tensor.detach`.
"""

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.kit import GraphPass


class RemoveDetach(GraphPass):
    """The pass."""

    level = "joint"

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        changed = False
        for node in graph.find_nodes(op="call_function", target=aten.detach.default):
            replaced = node.replace_all_uses_with(
                node.args[0], delete_user_cb=lambda u: u.op != "output" or not capture.aliases
            )
            if not node.users:
                graph.erase_node(node)
            changed |= bool(replaced) or not node.users
        return changed
