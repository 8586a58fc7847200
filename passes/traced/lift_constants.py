"""Turn tensors that the graph holds into inputs that keep their present values.

Before   %c: f32[n] = attribute
         %y = aten.add(%x: f32[n], %c)
After    %c: f32[n] = constant
         %y = aten.add(%x, %c)
Keeps    values; a tensor that is held once is one input, however often it is read.
Source   design of programs: what lasts is a variable.
"""

from torch import Tensor, fx

from ipu_dynamo.capture.capture import Capture, Placeholder, unused
from ipu_dynamo.capture.outside import outside_of_graph, warn
from ipu_dynamo.capture.private.tracing import fake_mode, is_fake, to_fake
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.passes.levels import Level


class LiftConstants(GraphPass):
    """The pass.

    Args:
        level: of the graph.
        warn: say so for tensors that forward takes from outside the model.
    """

    needed = "a program holds no tensors but its variables"

    level: Level = "traced"
    warn: bool = True

    def applies(self, capture: Capture, contents: Contents) -> bool:
        return self.warn or contents.attributes

    def rewrite(self, capture: Capture) -> bool:
        if self.warn:
            warn(capture.report.outside)
        held = plan(capture)
        for target, nodes in held.items():
            self._lift(capture, target, nodes)
        return bool(held)

    def _lift(self, capture: Capture, target: str, nodes: list[fx.Node]) -> None:
        graph, value = capture.graph.graph, getattr(capture.graph, target)
        name, tensor = capture.report.attributes.get(id(value), (target, value))
        name = unused(name, capture.placeholders)
        last = capture.placeholder_nodes[-1:]
        with graph.inserting_after(last[0]) if last else graph.inserting_before(None):
            lifted = graph.placeholder(target.lstrip("_"))
        known = nodes[0].meta.get("val")
        lifted.meta["val"] = _fake_of(capture, value) if known is None else known
        for node in nodes:
            node.replace_all_uses_with(lifted)
            graph.erase_node(node)
        capture.placeholders = (*capture.placeholders, Placeholder(name, "constant"))
        capture.report.tensors = {**capture.report.tensors, name: tensor.detach().clone()}


class LiftJointConstants(LiftConstants):
    """The same on the joint graph, where the model's own functions are written out."""

    level: Level = "joint"

    def __call__(self, capture: Capture) -> bool:
        if self.warn:  # the trace has not seen the reads of these functions
            read = tuple(outside_of_graph(capture.graph).values())
            warn(read)
            capture.report.outside = (*capture.report.outside, *read)
        return LiftConstants(self.level, warn=False)(capture)


def plan(capture: Capture) -> dict[str, list[fx.Node]]:
    """The nodes that hold each tensor. Reads the graph only."""
    held: dict[str, list[fx.Node]] = {}
    for node in capture.graph.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(capture.graph, str(node.target), None), Tensor):
            held.setdefault(str(node.target), []).append(node)
    return held


def _fake_of(capture: Capture, value: Tensor) -> Tensor:
    """A fake of `value` in the mode of the graph's other values."""
    for node in capture.graph.graph.nodes:
        if is_fake(node.meta.get("val")):
            return to_fake(node.meta["val"].fake_mode, value)
    return to_fake(fake_mode(), value)
