"""Run passes on the bodies of loops and branches, after autograd.

Before   def body(%c: f16[n]):
             %d = aten.add(%c, 0.3)
             return (%d,)
         %r = ipu.loop([%x: f16[n]], [], [], 10, body)
         %y = %r[0]
After    def body(%c: f16[n]):
             %d = aten.add(%c, 0.300048828125)     # RoundScalars is among the passes
             return (%d,)
         %r = ipu.loop([%x], [], [], 10, body)
         %y = %r[0]
Keeps    what the passes keep of a graph; types of inputs and results.
Source   a body is a graph like the model's own.
"""

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, Joint
from ipu_dynamo.capture.control_flow.trace_control_flow import body_capture
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.bodies import Body, bodies_of
from ipu_dynamo.ops.control_flow import rename
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.extract import copied
from ipu_dynamo.passes.joint.precision.stochastic_rounding import computing_in_half, rounding
from ipu_dynamo.passes.kit import GraphPass, Pass
from ipu_dynamo.program.ir.function import body_of


class RewriteBodies(GraphPass):
    """The pass.

    Args:
        passes: run on each body, inner ones first.
        stochastic_rounding: is wanted, which no body has.
    """

    level = "joint"
    needed = "bodies would keep what their model has lost"

    passes: tuple[Pass, ...]
    stochastic_rounding: bool = False

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return contents.bodies

    def rewrite(self, capture: Joint) -> bool:
        return self._rewrite(capture.graph.graph, {})

    def _rewrite(self, graph: fx.Graph, done: dict[str, Body]) -> bool:
        """Let the loops and branches of a graph have rewritten bodies; `done` has these by name."""
        changed = False
        for node in graph.nodes:
            bodies = bodies_of(node)
            new = [self._rewritten(body, done, node) for body in bodies]
            if [body.name for body in new] != [body.name for body in bodies]:
                rename(node, new)
                changed = True
        return changed

    def _rewritten(self, body: Body, done: dict[str, Body], node: fx.Node) -> Body:
        if body.name not in done:
            capture = as_capture(body)
            graph = capture.graph.graph
            if self.stochastic_rounding and (computing_in_half(graph) or rounding(graph)):
                raise CompileError(
                    "a loop or branch rounds halves to the nearest, and not stochastically",
                    node=node,
                    hint="compute in float32 in its body, or leave out stochastic_rounding",
                    id="control-flow",
                )
            self._rewrite(graph, done)
            for step in self.passes:
                step(capture)
            done[body.name] = body_of(capture.graph)
        return done[body.name]


def as_capture(body: Body) -> Joint:
    """A copy of a body's graph, as passes take it."""
    graph, _ = copied(body.graph.graph)
    graph.output_node().meta = {"val": None}
    for node in graph.nodes:
        node.meta = dict(node.meta)
        node.meta.setdefault(BACKWARD, False)
    traced = body_capture(module_of(graph))
    return Joint(graph=traced.graph, placeholders=traced.placeholders, outputs=traced.outputs)
