"""Find the layers of shortened stacks in a joint graph, and prove that they are equal there.

Autograd runs the gradients of a layer's operators in reverse order. So the backward pass of a layer
is one stretch of the graph, as its forward pass is, and it reads the gradients of the layer after
it. Assume that the second and the third of four layers are equal, and read the same values of their
neighbours. Then any number of layers between them is equal as well: a layer has no further inputs.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.private.node_meta import CUSTOM, IS_GRADIENT_SUM, TAG
from ipu_dynamo.passes.aot.read_stages import is_backward
from ipu_dynamo.passes.traced.equal_layers.describe_arguments import call
from ipu_dynamo.passes.traced.equal_layers.find_stacks import KEPT
from ipu_dynamo.passes.traced.equal_layers.shorten_stacks import Label

Nodes = tuple[fx.Node, ...]
Address = tuple[str, int, int]  # "forward", "backward" or "input"; layers further on; position
SECOND, THIRD = KEPT // 2 - 1, KEPT // 2


@dataclass(frozen=True)
class JointStack:
    """A shortened stack in the joint graph.

    Args:
        forward, backward: the operators of each layer.
        inputs: the placeholders that only it reads, of each layer.
        gradients: where among the second layer's backward operators the gradient of each of its
            inputs is; None: it has none.
    """

    forward: tuple[Nodes, ...]
    backward: tuple[Nodes, ...]
    inputs: tuple[Nodes, ...]
    gradients: tuple[int | None, ...]

    def addresses(self, layer: int) -> dict[fx.Node, Address]:
        """Return the nodes of its stack that a layer may read, with their addresses.

        These are its own nodes, those of the layer before it in the forward pass, and those of the
        layer after it in the backward pass.
        """
        found: dict[fx.Node, Address] = {}
        for kind, step, nodes in (
            ("forward", -1, self.forward[layer - 1]),
            ("forward", 0, self.forward[layer]),
            ("backward", 0, self.backward[layer]),
            ("backward", 1, self.backward[layer + 1]),
            ("input", 0, self.inputs[layer]),
        ):
            found |= {node: (kind, step, place) for place, node in enumerate(nodes)}
        return found


def joint_stacks(
    joint: Joint,
    labels: dict[fx.Node, Label],
    inputs: Sequence[Sequence[Nodes]],
) -> list[JointStack] | None:
    """The stacks of a joint graph; None if they prove not to be of equal layers.

    Args:
        inputs: for each stack and each of its layers, the placeholders that only it reads.
    """
    sections: dict[tuple[int, int, bool], Nodes] = {}
    for key, nodes in _sections(joint.graph.graph, labels):
        if key is None:
            continue
        if key in sections:
            return None
        sections[key] = nodes
    stacks = []
    differentiated = any(map(is_backward, joint.graph.graph.nodes))
    for number, of_layers in enumerate(inputs):
        forward, backward = (
            tuple(sections.get((number, layer, direction), ()) for layer in range(KEPT))
            for direction in (False, True)
        )
        gradients = _gradients(joint, of_layers, backward)
        if gradients is None:
            return None
        stack = JointStack(forward, backward, tuple(of_layers), gradients)
        if not _equal(stack, differentiated) or not _closed(joint, stack):
            return None
        stacks.append(stack)
    return stacks


def _sections(
    joint: fx.Graph, labels: dict[fx.Node, Label]
) -> Iterator[tuple[tuple[int, int, bool] | None, Nodes]]:
    """Yield runs of operators of one layer and direction.

    A node without annotations, such as a sum of gradients, belongs to the run before it.
    """
    keys: list[tuple[fx.Node, tuple[int, int, bool] | None]] = []
    key: tuple[int, int, bool] | None = None
    for node in joint.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if (label := labels.get(node)) is not None:
            key = label.stack, label.layer, is_backward(node)
        elif node.meta.get(CUSTOM) and not node.meta.get(IS_GRADIENT_SUM):
            key = None
        keys.append((node, key))
    for key, group in groupby(keys, lambda item: item[1]):
        yield key, tuple(node for node, _ in group)


def _gradients(
    joint: Joint, inputs: Sequence[Nodes], backward: Sequence[Nodes]
) -> tuple[int | None, ...] | None:
    """Where the gradients of the inputs of the layers in the middle are; None: not in the same
    places of both."""
    of_inputs = {
        role.name: value
        for value, role in zip(joint.returned, joint.outputs, strict=True)
        if role.kind == "gradient"
    }
    names = {node: role.name for node, role in joint.roles().items()}
    places = []
    for layer in (SECOND, THIRD):
        position = {node: place for place, node in enumerate(backward[layer])}
        values = [of_inputs.get(names[node]) for node in inputs[layer]]
        if any(value is not None and value not in position for value in values):
            return None
        places.append(tuple(None if value is None else position[value] for value in values))
    return places[0] if places[0] == places[1] else None


def _equal(stack: JointStack, differentiated: bool) -> bool:
    """Whether both layers in the middle are the same, with the same neighbours.

    Gradients may pass through a layer without an operator that is known to be its own: only sums.
    Such a layer cannot be found.
    """
    if not stack.forward[SECOND] or (differentiated and not stack.backward[SECOND]):
        return False
    second, third = (_text(stack, layer) for layer in (SECOND, THIRD))
    return second == third


def _text(stack: JointStack, layer: int) -> Hashable:
    addresses = stack.addresses(layer)

    def address(node: fx.Node) -> Hashable:
        return addresses.get(node, node)

    return tuple(
        tuple((call(node, address), node.meta.get(TAG)) for node in nodes)
        for nodes in (stack.forward[layer], stack.backward[layer])
    )


def _closed(joint: Joint, stack: JointStack) -> bool:
    """Whether nothing but their neighbours reads the layers in the middle, gradients aside."""
    result = joint.output_node
    for layer in (SECOND, THIRD):
        around = range(layer - 1, layer + 2)
        readers = {n for i in around for n in (*stack.forward[i], *stack.backward[i])}
        given = {stack.backward[layer][place] for place in stack.gradients if place is not None}
        for node in (*stack.forward[layer], *stack.backward[layer]):
            allowed = {*readers, result} if node in given else readers
            if not allowed.issuperset(node.users):
                return False
        returned = [node for node in joint.returned if node in given]
        if len(returned) != len([place for place in stack.gradients if place is not None]):
            return False
    return True
