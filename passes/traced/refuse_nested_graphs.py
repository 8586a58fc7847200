"""Refuse operators that hold a graph of their own, such as `torch.cond`.

Before   %y = torch.ops.higher_order.cond(%p, %true_graph, %false_graph, [%x])
After    the same, or a CompileError that names the operator's line
Keeps    the graph.
Source   programs are flat: a function of a program is one graph.
"""

from dataclasses import dataclass
from typing import ClassVar

from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.private.graphs import HigherOrderOperator
from ipu_dynamo.passes.levels import Level


@dataclass(frozen=True)
class RefuseNestedGraphs:
    """The pass, before or after autograd."""

    name: ClassVar[str] = "RefuseNestedGraphs"

    level: Level = "traced"

    def __call__(self, capture: Capture) -> bool:
        for node in capture.graph.graph.nodes:
            if isinstance(node.target, HigherOrderOperator):
                raise CompileError(
                    f"operator {node.target} holds a graph or an effect of its own, which programs "
                    f"cannot have yet",
                    node=node,
                    hint="replace it (torch.cond by torch.where), or leave it out of the model",
                    id="operator",
                )
        return False
