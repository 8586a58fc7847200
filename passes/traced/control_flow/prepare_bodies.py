"""Run passes on the bodies of loops and branches, before autograd.

Before   def body(%c: f32[n]):
             %d = aten.relu(aten.dropout(%c, 0.5, False))
             return (%d,)
         %r = ipu.control_flow([%x: f32[n]], GraphFlow("loop", 1, 0, 10, "", bodies=(body,)))
         %y = %r[0]
After    def body(%c: f32[n]):
             %d = aten.relu(%c)
             return (%d,)
         %r = ipu.control_flow([%x], GraphFlow("loop", 1, 0, 10, "", bodies=(body,)))
         %y = %r[0]
Keeps    the graph; what the passes keep of a body.
Source   a body is a graph like the model's own.
"""

from torch import fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.capture.control_flow.trace_control_flow import ControlFlow
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.control_flow import FLOW
from ipu_dynamo.ops.marks.available_memory import set_available_memory_op
from ipu_dynamo.ops.marks.convolution_groups import begin_convolutions, end_convolutions
from ipu_dynamo.ops.marks.markers import (
    begin_block,
    end_block,
    recomputation_checkpoint_op,
)
from ipu_dynamo.ops.marks.overlap import overlap_input_op, overlap_output_op
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import Pass

_OUTSIDE = {
    begin_block: "a block",
    end_block: "a block",
    begin_convolutions: "a group of convolutions",
    end_convolutions: "a group of convolutions",
    overlap_input_op: "a mark of overlap",
    overlap_output_op: "a mark of overlap",
}


class PrepareBodies(Pass):
    """The pass. `passes` run on each body, inner ones first."""

    level = "traced"
    needed = "bodies would keep what their model has lost, types among it"

    passes: tuple[Pass, ...]

    def applies(self, capture: Traced, contents: Contents) -> bool:
        return FLOW in contents.marks

    def __call__(self, capture: Traced) -> bool:
        changed = False
        for flow in flows(capture.graph.graph):
            flow.lowered.clear()
            for body in flow.bodies:
                changed |= self(body)
                _refuse_marks(body.graph.graph)
                for step in self.passes:
                    changed |= bool(step(body))
                body.graph.recompile()
        return changed


def flows(graph: fx.Graph) -> list[ControlFlow]:
    """The loops and branches of a graph."""
    return [node.meta[FLOW] for node in graph.nodes if FLOW in node.meta]


def _refuse_marks(graph: fx.Graph) -> None:
    """Raise for marks that only a whole model can have; erase those without effect in a body."""
    for node in list(graph.nodes):
        if node.target in _OUTSIDE:
            raise CompileError(
                f"{_OUTSIDE[node.target]} begins or ends in the body of a loop or branch",
                node=node,
                hint="put the whole loop into it",
                id="control-flow",
            )
        if node.target in (recomputation_checkpoint_op, set_available_memory_op):
            graph.erase_node(node)
