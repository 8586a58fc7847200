"""Leave out layers of stacks that are equal to others, and label those that stay.

Before   %y = aten.tanh(aten.tanh(aten.tanh(aten.tanh(aten.tanh(%x: f32[n])))))
         return %y
After    def all_layers(%x: f32[n]):
             %y = aten.tanh(aten.tanh(aten.tanh(aten.tanh(aten.tanh(%x)))))
             return %y
         capture.whole = all_layers
         %a = aten.tanh(%x)  with meta["custom"] = {"ipu_layer": (0, 0, 0)}
         %b = aten.tanh(%a)  with meta["custom"] = {"ipu_layer": (0, 1, 0)}
         %c = aten.tanh(%b)  with meta["custom"] = {"ipu_layer": (0, 2, 0)}
         %d = aten.tanh(%c)  with meta["custom"] = {"ipu_layer": (0, 3, 0)}
         return %d
Keeps    the operators that stay and their order, in a graph of its own.
Source   design of this project: autograd makes the same operators of equal layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.ops.private.node_meta import CUSTOM, annotate
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.traced.equal_layers.find_stacks import KEPT, Stack, find_stacks

_KEY = "ipu_layer"  # key of node.meta["custom"], which AOTAutograd copies


@dataclass(frozen=True, slots=True)
class Label:
    """The operator of a shortened stack that AOTAutograd made a node of.

    Args:
        stack: its number.
        layer: which of the layers that stay, from 0.
        place: of the operator in the layer.
    """

    stack: int
    layer: int
    place: int


class ShortenStacks(Pass):
    """The pass."""

    level = "traced"

    def __call__(self, capture: Traced) -> Traced:
        stacks = find_stacks(capture)
        return apply(capture, stacks) if stacks else capture


def left_out(stack: Stack) -> range:
    """Which layers of a stack are left out."""
    return range(KEPT // 2, len(stack) - KEPT // 2)


def kept_layers(stack: Stack) -> list[int]:
    """Which layers of a stack stay."""
    return [index for index in range(len(stack)) if index not in left_out(stack)]


def apply(capture: Traced, stacks: Sequence[Stack]) -> Traced:
    """A copy of a model that has no more layers than needed."""
    gone: set[fx.Node] = set()
    labels: dict[fx.Node, tuple[int, int, int]] = {}
    stand_ins: dict[fx.Node, fx.Node] = {}
    for number, stack in enumerate(stacks):
        out = left_out(stack)
        for layer in (stack[index] for index in out):
            gone.update(layer.operators, layer.inputs)
        for position, index in enumerate(kept_layers(stack)):
            for place, node in enumerate(stack[index].operators):
                labels[node] = number, position, place
        pairs = zip(stack[out.stop - 1].operators, stack[out.start - 1].operators, strict=True)
        stand_ins.update(pairs)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def copy_of(node: fx.Node) -> fx.Node:
        return copies[stand_ins.get(node, node)]

    for node in capture.graph.graph.nodes:
        if node in gone:
            continue
        copy = copies[node] = graph.node_copy(node, copy_of)
        if node in labels:
            annotate(copy, _KEY, labels[node])
    return replace(
        capture,
        graph=module_of(graph, capture.graph),
        placeholders=tuple(role for node, role in capture.roles().items() if node not in gone),
        loss=capture.loss and copies[capture.loss],
        whole=capture,
    )


def take_label(node: fx.Node) -> Label | None:
    """Remove and return the label that a node has from its original before AOTAutograd."""
    custom: dict[str, Any] = node.meta.get(CUSTOM) or {}
    if _KEY not in custom:
        return None
    label = Label(*custom[_KEY])
    rest = {key: value for key, value in custom.items() if key != _KEY}
    node.meta.pop(CUSTOM)
    if rest:
        node.meta[CUSTOM] = rest
    return label
