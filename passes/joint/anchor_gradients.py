"""Return gradients inside the model to the host, of parameters and of results of operators.

With     anchors={"g": Anchor("fc1/Relu:0", of="gradient")}
Before   %m = ipu.gradient(%g: f32[m,n], "fc1/Relu:0")
         %y = aten.relu(%m)
After    %y = aten.relu(%g)
         return (%y, %g)
         capture.report.anchors = {"g": "1"}
Keeps    every other operator: without the mark the graph is as it would have been.
Source   PopTorch user guide, "poptorch.Options.anchorTensor".
"""

from collections.abc import Mapping
from dataclasses import field

from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.marks.markers import gradient_op
from ipu_dynamo.options import Anchor
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.passes.traced.anchor_values import anchor_value


class AnchorGradients(GraphPass):
    """The pass."""

    level = "joint"
    needed = "marks of gradients are no operators"

    anchors: Mapping[str, Anchor] = field(default_factory=dict)

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return bool(self.anchors) or gradient_op in contents.targets

    def rewrite(self, capture: Joint) -> bool:
        marks = capture.graph.graph.find_nodes(op="call_function", target=gradient_op)
        anchored = plan(capture, list(marks), self.anchors)
        for short, node in anchored.items():
            anchor_value(capture, short, node)
        for mark in marks:
            mark.replace_all_uses_with(mark.args[0])
            capture.graph.graph.erase_node(mark)
        return bool(marks or anchored)


def plan(capture: Joint, marks: list[fx.Node], anchors: Mapping[str, Anchor]) -> dict[str, fx.Node]:
    """The gradient that each anchor of one is of. Reads the graph only."""
    gradients: dict[object, fx.Node] = {mark.args[1]: mark for mark in marks}
    for node, role in zip(capture.returned, capture.outputs, strict=True):
        if role.kind == "gradient" and node is not None:
            gradients[role.name] = node
    return {
        short: gradients[anchor.name]
        for short, anchor in anchors.items()
        if anchor.of == "gradient"
        and anchor.name in gradients
        and short not in capture.report.anchors
    }
