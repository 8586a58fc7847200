"""Let readers of a view read its source instead, if both are the same tensor.

Before   %a = aten.t(%w: f32[m,n])
         %b = aten.t(%a)
         %c = aten.view(%x: f32[n,k], [n, k])
         %y = aten.mm(%b, %c)
After    %y = aten.mm(%w, %x)
Keeps    values, types, strides and memory; a returned value is still no input.
Source   a tensor is its memory, type, sizes, strides and offset.
"""

import torch
from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.graph_queries import is_view
from ipu_dynamo.passes.kit import GraphPass


def plan(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each view the first of its sources that is the same tensor."""
    same: dict[fx.Node, fx.Node] = {}
    for node in filter(is_view, graph.nodes):
        returned, source = any(user.op == "output" for user in node.users), node
        while is_view(source):
            source = source.all_input_nodes[0]
            if _shown(source) == _shown(node) and not (returned and source.op == "placeholder"):
                same[node] = source
    return same


def _shown(node: fx.Node) -> object:
    """Return the properties that distinguish tensors in one memory; of other values, the node."""
    x = node.meta["val"]
    if not isinstance(x, torch.Tensor):
        return node
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()


class DropSameViews(GraphPass):
    """The pass."""

    level = "joint"

    def rewrite(self, capture: Joint) -> bool:
        same = plan(capture.graph.graph)
        for node, source in same.items():
            node.replace_all_uses_with(source)
        for node in filter(is_view, reversed(capture.graph.graph.nodes) if same else ()):
            if not node.users:
                capture.graph.graph.erase_node(node)
        return bool(same)
