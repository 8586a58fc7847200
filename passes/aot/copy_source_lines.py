"""Give views of tensors that were changed in place the source line of the change.

Before   %a = aten.relu(%x: f32[2,2])  # model.py:3 in forward: y.relu_()
         %v = aten.view(%a, [4])       # PyTorch makes it again after a change in place
After    %a = aten.relu(%x)            # model.py:3 in forward: y.relu_()
         %v = aten.view(%a, [4])       # model.py:3 in forward: y.relu_()
Keeps    the graph.
Source   PyTorch's functionalisation.
"""

from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.passes.kit import Pass


class CopySourceLines(Pass):
    """The pass."""

    level = "joint"

    def __call__(self, capture: Joint) -> bool:
        changed = False
        for node in capture.graph.graph.nodes:
            line = None if node.meta.get("stack_trace") else _line_of_sources(node)
            if node.op == "call_function" and line:
                node.meta["stack_trace"] = line
                changed = True
        return changed


def _line_of_sources(node: fx.Node) -> str | None:
    lines = (source.meta.get("stack_trace") for source in node.all_input_nodes)
    return next(filter(None, lines), None)
