"""Write to convolutions their group, and to operators the memory that they may use.

Before   ipu.begin_convolutions("parallel", ["half"], [], 0)
         %a = aten.conv2d(%x: f32[n,k,9,9], %w: f32[k,k,3,3])
         %b = aten.conv2d(%y: f32[n,k,9,9], %w)
         ipu.end_convolutions()
After    %a = aten.conv2d(%x, %w)
         %b = aten.conv2d(%y, %w)
         %a  with meta["custom"] = {"ipu_convolution": Member(0, 1, 2, "parallel", "half")}
         %b  with meta["custom"] = {"ipu_convolution": Member(0, 2, 2, "parallel", "half")}

Before   %h = aten.linear(%x: f32[m,k], %w: f32[n,k])
         %y = aten.relu(%h)
         ipu.set_available_memory(%y, 0.25)
         return (%y,)
After    %h = aten.linear(%x, %w)  with meta["custom"] = {"ipu_memory": "0.25"}
         %y = aten.relu(%h)
         return (%y,)
Keeps    every operator and its order.
Source   PopTorch user guide, "poptorch.MultiConv" and "poptorch.set_available_memory".
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.marks.available_memory import CONVOLUTIONS, PLANNED, set_available_memory_op
from ipu_dynamo.ops.marks.convolution_groups import begin_convolutions, end_convolutions
from ipu_dynamo.ops.private.node_meta import annotate, annotation
from ipu_dynamo.passes.kit import GraphPass

_KEY = "ipu_convolution"  # key of node.meta["custom"]
MEMORY_SHARE = "ipu_memory"  # key of node.meta["custom"]: a share of an IPU's memory, as a text
_LEVELS = 2  # of operators between a value and the one that is planned


class NestedGroups(CompileError):
    """A group of convolutions begins inside another one."""


class EmptyGroup(CompileError):
    """A group of convolutions has none."""


@dataclass(frozen=True, slots=True)
class Member:
    """A convolution's place in its group.

    Args:
        group: number of the group in the model, from 0.
        place: number of the convolution in the group, from 1.
        count: convolutions of the group.
        plan: `parallel` or `serial`.
        partials: precision of the partial sums, `float` or `half`; empty: that of the options.
    """

    group: int
    place: int
    count: int
    plan: str
    partials: str


@dataclass(frozen=True, slots=True)
class _Group:
    """A group as it is marked."""

    begin: fx.Node
    convolutions: list[fx.Node]

    def members(self, number: int) -> Iterator[tuple[fx.Node, Member, str]]:
        """Each convolution with its place, and its share of memory or an empty text.

        Raises:
            CompileError: there are no convolutions, or not as many as the group was made for.
        """
        plan, partials, shares, expected = self.begin.args
        count = len(self.convolutions)
        if not count:
            raise EmptyGroup(
                "a group of convolutions has none",
                node=self.begin,
                hint="call the convolutions inside the context, or leave it out",
            )
        if expected not in (0, count):
            raise CompileError(
                f"a group was given settings for {expected} convolutions, and has {count}",
                node=self.begin,
                hint="give one setting for all, or one for each",
            )
        each = zip(self.convolutions, _each(partials, count), _each(shares, count), strict=True)
        for place, (node, precision, share) in enumerate(each):
            yield node, Member(number, place + 1, count, str(plan), precision), share


def member(node: fx.Node) -> Member | None:
    """Return the tag of a convolution, or of its gradients."""
    tagged: Member | None = annotation(node, _KEY)
    return tagged


def plan(graph: fx.Graph) -> list[_Group]:
    """The groups, in the order of the model. Reads the graph only."""
    groups: list[_Group] = []
    inside = False
    for node in graph.nodes:
        if node.target is begin_convolutions:
            if inside:
                raise NestedGroups(
                    "a group of convolutions begins inside another one",
                    node=node,
                    hint="leave one of the contexts out",
                )
            groups.append(_Group(node, []))
            inside = True
        elif node.target is end_convolutions:
            inside = False
        elif inside and node.target in CONVOLUTIONS:
            groups[-1].convolutions.append(node)
    return groups


class TagConvolutionGroups(GraphPass):
    """The pass.

    Args:
        memory: the share of all convolutions that have none of their own; None: that of their IPU.
    """

    memory: float | None = None
    level = "traced"
    acts_on = (*CONVOLUTIONS, begin_convolutions, end_convolutions, set_available_memory_op)
    needed = "its markers compute nothing that a stage could run"

    def rewrite(self, capture: Traced) -> bool:
        graph = capture.graph.graph
        convolutions = [node for node in graph.nodes if node.target in CONVOLUTIONS]
        if self.memory is not None:
            for node in convolutions:
                annotate(node, MEMORY_SHARE, str(self.memory))
        groups = plan(graph)
        for number, group in enumerate(groups):
            for node, place, share in group.members(number):
                annotate(node, _KEY, place)
                if share:
                    annotate(node, MEMORY_SHARE, share)
        shares = list(graph.find_nodes(op="call_function", target=set_available_memory_op))
        for mark in shares:
            value, share = mark.args
            assert isinstance(value, fx.Node)
            if (planned := _planned(value)) is not None:
                annotate(planned, MEMORY_SHARE, str(share))
            graph.erase_node(mark)
        for node in list(graph.nodes):
            if node.target in (begin_convolutions, end_convolutions):
                graph.erase_node(node)
        return bool(groups) or bool(shares) or (self.memory is not None and bool(convolutions))


def _each(settings: object, count: int) -> list[str]:
    """The setting of each convolution as a text; empty: it has none."""
    assert isinstance(settings, list | tuple)
    texts = [str(one) for one in settings]
    return texts if len(texts) > 1 else [*texts, ""][:1] * count


def _planned(value: fx.Node) -> fx.Node | None:
    """The nearest operator that an IPU plans by memory, up to two before the one of `value`."""
    level = [value]
    for _ in range(_LEVELS + 1):
        for node in level:
            if node.target in PLANNED:
                return node
        level = [source for node in level for source in node.all_input_nodes]
    return None
