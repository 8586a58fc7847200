"""Put the convolutions of a group side by side, and their gradients too.

Before   %a = aten.convolution(%x: f32[n,k,9], %w: f32[k,k,3], None, [1], [0], [1], False, [0], 1)
         %r = aten.relu(%a)
         %y = aten.abs(%x)
         %b = aten.convolution(%y, %v: f32[k,k,3], None, [1], [0], [1], False, [0], 1)
         %a  with meta["custom"] = {"ipu_convolution": Member(0, 1, 2, "parallel", "half")}
         %b  with meta["custom"] = {"ipu_convolution": Member(0, 2, 2, "parallel", "half")}
After    %y = aten.abs(%x)
         %a = aten.convolution(%x, %w, None, [1], [0], [1], False, [0], 1)
         %b = aten.convolution(%y, %v, None, [1], [0], [1], False, [0], 1)
         %r = aten.relu(%a)
         %a  with meta["custom"] = {"ipu_convolution": Member(0, 1, 2, "parallel", "half")}
         %b  with meta["custom"] = {"ipu_convolution": Member(0, 2, 2, "parallel", "half")}
         %a  with meta["ipu.group"] = "parallel 1/2" and meta["ipu.partials"] = "half"
         %b  with meta["ipu.group"] = "parallel 2/2" and meta["ipu.partials"] = "half"
Keeps    all values and operators; stages and source lines.
Source   PopTorch user guide, "poptorch.MultiConv".
"""

from collections import defaultdict

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.passes.traced.tag_convolution_groups import Member, member
from ipu_dynamo.program import GROUP

PARTIALS = "ipu.partials"  # key of node.meta: precision of a convolution's partial sums
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_Group = list[tuple[fx.Node, Member]]


def _check(node: fx.Node, first: fx.Node, *, depends: bool) -> None:
    if depends:
        raise CompileError(
            "a convolution reads the result of another one of its group",
            node=node,
            hint="put it behind the context, or into a group of its own",
        )
    if node.meta.get(STAGE) != first.meta.get(STAGE):
        raise CompileError(
            f"a group has convolutions on the stages {first.meta.get(STAGE)} "
            f"({source_line(first)}) and {node.meta.get(STAGE)}",
            node=node,
            hint="begin no block inside the context",
        )


class ScheduleConvolutionGroups(GraphPass):
    """The pass."""

    level = "joint"
    acts_on = _CONVOLUTIONS

    def plan(self, graph: fx.Graph) -> list[_Group]:
        """The convolutions of each group and direction that are not side by side yet."""
        groups: dict[tuple[int, bool], _Group] = defaultdict(list)
        for node in graph.nodes:
            place = member(node) if node.target in _CONVOLUTIONS else None
            if place is not None and GROUP not in node.meta:
                groups[place.group, bool(node.meta.get(BACKWARD))].append((node, place))
        return list(groups.values())

    def apply(self, graph: fx.Graph, group: _Group) -> None:
        """Move nodes that depend on a convolution after the last one, others before the first one.

        Raises:
            CompileError: one convolution depends on another, or is on another stage.
        """
        order = {node: index for index, node in enumerate(graph.nodes)}
        # Groups before this one may have moved its nodes.
        nodes = sorted((node for node, _ in group), key=order.__getitem__)
        first, last = nodes[0], nodes[-1]
        behind: set[fx.Node] = set()
        between: list[fx.Node] = []
        node = first
        while node is not last.next:
            depends = bool(behind.intersection(node.all_input_nodes))
            if node in nodes:
                _check(node, first, depends=depends)
            else:
                between.append(node)
            if depends or node in nodes:
                behind.add(node)
            node = node.next
        end = last
        for node in between:
            if node in behind:
                end.append(node)
                end = node
            else:
                first.prepend(node)
        for node, place in group:
            node.meta[GROUP] = f"{place.plan} {place.place}/{place.count}"
            if place.partials:
                node.meta[PARTIALS] = place.partials
