"""Give prints without a title the name of their tensor.

Before   %y = aten.relu(%x: f32[n])  with meta["ipu.name"] = "fc1/Relu:0"
         %p = ipu.print_tensor(%y, "", True, ...)
After    %y = aten.relu(%x)  with meta["ipu.name"] = "fc1/Relu:0"
         %p = ipu.print_tensor(%y, "fc1/Relu:0", True, ...)
Keeps    every other operator, and titles that users give.
Source   PopTorch user guide, "poptorch.ipu_print_tensor".
"""

from torch import fx

from ipu_dynamo.capture.capture import NAME, Traced
from ipu_dynamo.ops.marks.print_tensor import print_tensor_op
from ipu_dynamo.passes.kit import GraphPass


class TitlePrints(GraphPass):
    """The pass."""

    level = "traced"
    acts_on = (print_tensor_op,)

    def rewrite(self, capture: Traced) -> bool:
        titles = plan(capture)
        for node, title in titles.items():
            node.args = (node.args[0], title, *node.args[2:])
        return bool(titles)


def plan(capture: Traced) -> dict[fx.Node, str]:
    """The title of each print that has none. Reads the graph only."""
    roles, titles = capture.roles(), dict[fx.Node, str]()
    for node in capture.graph.graph.find_nodes(op="call_function", target=print_tensor_op):
        source, title = node.args[:2]
        if not title:
            named = roles[source].name if source in roles else source.name
            titles[node] = source.meta.get(NAME, named)
    return titles
