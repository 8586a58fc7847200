"""Find stacks of equal layers in a traced graph: where each reads the one before.

Layers are equal when they have the same operators with the same arguments in the same order, on
values with the same layouts. Their own inputs play the same roles, and all others are the same for
all layers. Only the next layer reads a layer's values. The search is skipped in a graph that writes
in place, or has operators whose gradients are Python of others.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import getitem

from torch import fx

from ipu_dynamo.capture.capture import WANTED_GRADIENTS, Placeholder, Traced
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.passes.graph.repeats import Run, find_runs
from ipu_dynamo.passes.traced.equal_layers.describe_arguments import call, layout

KEPT = 4  # layers of a stack that are differentiated: the first two and the last two


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Operators of one layer, in order, and the placeholders that nothing but it reads."""

    operators: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]


Stack = tuple[StackLayer, ...]


def find_stacks(capture: Traced) -> list[Stack]:
    """Stacks of which at least one layer need not be differentiated, in order."""
    graph, roles = capture.graph.graph, capture.roles()
    operators = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if not all(map(_is_pure, operators)):
        return []
    runs = find_runs([call(node, lambda read: layout(read.meta["val"])) for node in operators])
    stacks = (_longest(_layers(operators, run), roles) for run in runs)
    return [stack for stack in stacks if len(stack) > KEPT]


def _is_pure(node: fx.Node) -> bool:
    """Whether it is PyTorch's own operator that changes nothing, without a wanted gradient."""
    if node.op != "call_function" or WANTED_GRADIENTS in node.meta:
        return False
    if node.target is getitem:
        return True
    target = node.target
    return isinstance(target, OpOverload) and target.namespace == "aten" and not writes(node)


def _layers(operators: Sequence[fx.Node], run: Run) -> list[StackLayer]:
    starts = range(run.start, run.start + run.count * run.period, run.period)
    return [_layer(operators[start : start + run.period]) for start in starts]


def _layer(operators: Sequence[fx.Node]) -> StackLayer:
    here = set(operators)
    read = dict.fromkeys(source for node in operators for source in node.all_input_nodes)
    own = (node for node in read if node.op == "placeholder" and here.issuperset(node.users))
    return StackLayer(tuple(operators), tuple(own))


def _longest(layers: Sequence[StackLayer], roles: Mapping[fx.Node, Placeholder]) -> Stack:
    """Return the longest run of equal `layers`; the first of them may have other inputs."""
    texts = [_text(layer, before, roles) for before, layer in pairwise(layers)]
    best = range(0)
    first = 0
    for index in range(len(texts)):
        if index > first and (
            texts[index] != texts[first] or not _read_by(layers[index], layers[index + 1])
        ):
            first = index
        if index + 1 - first > len(best):
            best = range(first, index + 1)
    return tuple(layers[best.start : best.stop + 1]) if best else ()


def _text(layer: StackLayer, before: StackLayer, roles: Mapping[fx.Node, Placeholder]) -> Hashable:
    """Return a key that is the same for equal layers."""
    addresses: dict[fx.Node, Hashable] = {}
    for kind, nodes in (
        ("before", before.operators),
        ("own", layer.operators),
        ("input", layer.inputs),
    ):
        addresses |= {node: (kind, place) for place, node in enumerate(nodes)}
    inputs = tuple(
        (replace(roles[node], name=""), layout(node.meta["val"])) for node in layer.inputs
    )
    return inputs, tuple(call(n, lambda read: addresses.get(read, read)) for n in layer.operators)


def _read_by(layer: StackLayer, after: StackLayer) -> bool:
    """Whether only a layer itself and the one after it read its values."""
    readers = {*layer.operators, *after.operators}
    return all(readers.issuperset(node.users) for node in layer.operators)
