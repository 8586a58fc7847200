"""Compute anchored and printed values by operators of their own, at the end of their part.

Before   %g = aten.mm(%a: f32[m,k], %b: f32[k,n])
         return (%g, %g)
         capture.report.anchors = {"g": "1"}
After    %g = aten.mm(%a, %b)
         %h = aten.mm(%a, %b)
         return (%g, %h)
         %h  with meta["ipu.anchored"] = True
Keeps    every value, to the bit. Patterns of later passes stay as they are, so that the program
         computes all else as it does without anchors: a product that is added to an accumulator
         in place stays so.
Source   PopTorch user guide, "poptorch.Options.anchorTensor".
"""

from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import only_looks, writes
from ipu_dynamo.ops.operator_costs import ANCHORED
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import GraphPass


class SeparateAnchors(GraphPass):
    """The pass."""

    level = "joint"

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return bool(capture.report.anchors or capture.report.prints)

    def rewrite(self, capture: Joint) -> bool:
        anchored = {*capture.report.anchors.values(), *capture.report.prints}
        if not anchored:
            return False
        returned, copies = capture.returned, dict[fx.Node, fx.Node]()
        for place, role in enumerate(capture.outputs):
            node = returned[place]
            if role.kind == "value" and role.name in anchored and node is not None:
                returned[place] = _separated(node, copies)
        before = capture.returned
        if returned == before:
            return False
        capture.set_returned(returned, list(capture.outputs))
        for node in before:
            if node is not None and not node.users and node.op == "call_function":
                capture.graph.graph.erase_node(node)
        return True


def _separated(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return a copy of `node`'s operator, or of its original if it is a clone; else `node`."""
    if ANCHORED in node.meta:
        return node
    source = node.args[0] if node.target is aten.clone.default else node
    assert isinstance(source, fx.Node)
    copy = _copy(source, copies)
    return node if copy is source else copy


def _copy(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy `node` to the end of the graph, with the views between it and its operator."""
    looks = only_looks(node)
    plain = node.op == "call_function" and (looks or isinstance(node.target, OpOverload))
    if not plain or writes(node):
        return node
    if node not in copies:
        sources = {node.all_input_nodes[0]: _copy(node.all_input_nodes[0], copies)} if looks else {}
        with node.graph.inserting_before(node.graph.output_node()):
            copies[node] = node.graph.node_copy(node, lambda n: sources.get(n, n))
        copies[node].meta = {**node.meta, ANCHORED: True}
    return copies[node]
