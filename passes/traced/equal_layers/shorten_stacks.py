"""Leave out the layers of stacks that others stand for, and label those that stay.

Before   %h1 = layer(%x, %w0);  ...  %h48 = layer(%h47, %w47)
After    %h1 = layer(%x, %w0);  %h2 = layer(%h1, %w1)
         %h47 = layer(%h2, %w46);  %h48 = layer(%h47, %w47)
Keeps    the operators that stay and their order, in a graph of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.ops.private.node_meta import CUSTOM
from ipu_dynamo.passes.traced.equal_layers.find_stacks import KEPT, Stack

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


@dataclass(frozen=True)
class Shortened:
    """A graph without most layers of its stacks.

    Args:
        copies: what stands for the nodes that stay.
        inputs: which of the placeholders stay.
    """

    graph: fx.GraphModule
    copies: dict[fx.Node, fx.Node]
    inputs: tuple[int, ...]


def left_out(stack: Stack) -> range:
    """Which layers of a stack are left out."""
    return range(KEPT // 2, len(stack) - KEPT // 2)


def kept_layers(stack: Stack) -> list[int]:
    """Which layers of a stack stay."""
    return [index for index in range(len(stack)) if index not in left_out(stack)]


def shorten(module: fx.GraphModule, stacks: Sequence[Stack]) -> Shortened:
    """A copy of a graph that has no more layers than needed."""
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
    inputs = []

    def copy_of(node: fx.Node) -> fx.Node:
        return copies[stand_ins.get(node, node)]

    for index, node in enumerate(module.graph.nodes):  # placeholders come first
        if node in gone:
            continue
        if node.op == "placeholder":
            inputs.append(index)
        copy = copies[node] = graph.node_copy(node, copy_of)
        if node in labels:
            copy.meta[CUSTOM] = {**(copy.meta.get(CUSTOM) or {}), _KEY: labels[node]}
    return Shortened(module_of(graph, module), copies, tuple(inputs))


def take_label(node: fx.Node) -> Label | None:
    """The label of what AOTAutograd made a node of; it has none any more."""
    custom: dict[str, Any] = node.meta.get(CUSTOM) or {}
    if _KEY not in custom:
        return None
    label = Label(*custom[_KEY])
    rest = {key: value for key, value in custom.items() if key != _KEY}
    node.meta.pop(CUSTOM)
    if rest:
        node.meta[CUSTOM] = rest
    return label
