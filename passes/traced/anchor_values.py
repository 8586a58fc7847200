"""Return values inside the model to the host: inputs, results of operators, buffers.

With     anchors={"h": Anchor("fc1/Relu:0")}
Before   %h = aten.relu(%x: f32[n])  with meta["ipu.name"] = "fc1/Relu:0"
         %y = aten.sin(%h)
After    %h = aten.relu(%x)  with meta["ipu.name"] = "fc1/Relu:0"
         %c = aten.clone(%h)
         %y = aten.sin(%h)
         return (%y, %c)
         capture.report.names = ("fc1/Relu:0",)
         capture.report.anchors = {"h": "1"}
Keeps    every other operator. Values are those of the moment: what is changed in place later is not
         seen, but a buffer is taken at the end of the micro-batch.
Source   PopTorch user guide, "poptorch.Options.anchorTensor".
"""

from collections.abc import Iterator, Mapping
from dataclasses import field

from torch import fx

from ipu_dynamo.capture.capture import (
    MATMUL_NAME,
    NAME,
    STAGE,
    WANTED_GRADIENTS,
    Capture,
    Traced,
)
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.options import Anchor
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.kit import Pass


class AnchorValues(Pass):
    """The pass. Gradients are marked only; variables that no operator makes are left alone."""

    level = "traced"
    needed = "anchors are part of the program"

    anchors: Mapping[str, Anchor] = field(default_factory=dict)

    def __call__(self, capture: Traced) -> bool:
        names_before = capture.report.names
        capture.report.names = tuple(name for name, _ in _named(capture.graph.graph))
        anchored = plan(capture, self.anchors)
        for short, node in anchored.items():
            anchor_value(capture, short, _moment(capture, node, self.anchors[short].name))
        names = {anchor.name for anchor in self.anchors.values() if anchor.of == "gradient"}
        marked = [
            (name, node)
            for name, node in _named(capture.graph.graph)
            if name in names - node.meta.get(WANTED_GRADIENTS, frozenset())
        ]
        for name, node in marked:
            node.meta[WANTED_GRADIENTS] = {name} | node.meta.get(WANTED_GRADIENTS, frozenset())
        if anchored:
            capture.graph.recompile()
        return bool(anchored or marked) or capture.report.names != names_before


def plan(capture: Traced, anchors: Mapping[str, Anchor]) -> dict[str, fx.Node]:
    """The node that each anchor of a value is of, where the graph has it. Reads the graph only."""
    nodes = dict(_named(capture.graph.graph))
    kinds = {role.name: (role.kind, node) for node, role in capture.roles().items()}
    anchored = {}
    for short, anchor in anchors.items():
        if anchor.of != "value" or short in capture.report.anchors:
            continue
        kind, node = kinds.get(anchor.name, ("", None))
        of_graph = kind == "input" or (kind == "buffer" and anchor.returns != "final")
        if of_graph and node is not None:
            anchored[short] = node
        elif anchor.name in nodes:
            anchored[short] = nodes[anchor.name]
    return anchored


def anchor_value(capture: Capture, short: str, node: fx.Node) -> None:
    """Return `node` as the value of the anchor `short`, after all other values."""
    capture.report.anchors = {**capture.report.anchors, short: capture.return_value(node)}


def _named(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    for node in graph.nodes:
        for key in (NAME, MATMUL_NAME):
            if key in node.meta:
                yield node.meta[key], node


def _moment(capture: Traced, node: fx.Node, name: str) -> fx.Node:
    """A copy of the value that is called `name`, made where it is that value."""
    graph = capture.graph.graph
    if node.op == "placeholder":
        readers = sorted(user for user in node.users if STAGE in user.meta)
        is_input = capture.roles()[node].kind == "input"
        place = next(n for n in graph.nodes if n.op != "placeholder") if is_input else None
        with graph.inserting_before(place or capture.output_node):
            copy = call(graph, aten.clone.default, node, origin=node)
        copy.meta[STAGE] = readers[0 if is_input else -1].meta[STAGE] if readers else 0
        return copy
    with graph.inserting_after(node):
        if node.meta.get(MATMUL_NAME) == name:
            value, weight, _ = node.args
            return call(graph, node.target, value, weight, origin=node)
        return call(graph, aten.clone.default, node, origin=node)
