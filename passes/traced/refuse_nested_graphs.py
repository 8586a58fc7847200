"""Refuse operators of PyTorch that hold a graph of their own.

Before   %y = higher_order.with_effects(%t: f32[0], aten.relu.default, %x: f32[n])
After    raise CompileError("holds a graph or an effect of its own")
Keeps    the graph.
Source   functions of programs are flat: what loops and branches run is another function, by name.
"""

from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.private.graphs import HigherOrderOperator
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Level


class RefuseNestedGraphs(Pass):
    """The pass, before or after autograd."""

    level: Level = "traced"

    def applies(self, capture: Capture, contents: Contents) -> bool:
        return any(isinstance(target, HigherOrderOperator) for target in contents.targets)

    def __call__(self, capture: Capture) -> bool:
        for node in capture.graph.graph.nodes:
            if isinstance(node.target, HigherOrderOperator):
                raise CompileError(
                    f"operator {node.target} holds a graph or an effect of its own, which programs "
                    f"cannot have yet",
                    node=node,
                    hint="replace it by operators, loops or branches, or leave it out of the model",
                    id="operator",
                )
        return False
