"""Put the layers that were left out into the joint graph.

Before   the joint graph of shortened stacks
After    the one that AOTAutograd would have made of all layers: the same operators in the same
         order, with the same values, descriptions and names
Keeps    operators. A copy has the source line, stage and other annotations of its own layer.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.private.aot import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.ops.private.node_meta import (
    CUSTOM,
    DESC,
    FROM_NODE,
    GRADIENT_SUM,
    INPUTS,
    IS_GRADIENT_SUM,
    SEQ_NR,
)
from ipu_dynamo.passes.traced.equal_layers.find_stacks import Layer, Stack
from ipu_dynamo.passes.traced.equal_layers.joint_layers import (
    SECOND,
    THIRD,
    Address,
    JointStack,
    Nodes,
    joint_stacks,
)
from ipu_dynamo.passes.traced.equal_layers.shorten_stacks import (
    Label,
    Shortened,
    kept_layers,
    left_out,
    take_label,
)

_PASSING = (SEQ_NR, FROM_NODE)  # keys of meta that say how AOTAutograd made a node


def lengthen(
    joint: fx.GraphModule,
    shortened: Shortened,
    stacks: Sequence[Stack],
    placeholders: Sequence[fx.Node],
    values: Sequence[Tensor],
) -> fx.GraphModule | None:
    """The joint graph of all layers; None if the layers of a stack are not equal there.

    Args:
        placeholders: of the traced graph.
        values: fake tensors like them.
    """
    labels = {
        node: label
        for node in joint.graph.nodes
        if (label := take_label(node)) is not None and not node.meta.get(IS_GRADIENT_SUM)
    }
    result = joint.graph.output_node()
    known = PlainAOTInput, TangentAOTInput
    nodes = list(joint.graph.find_nodes(op="placeholder"))
    if not all(isinstance(node.meta[DESC], known) for node in nodes):
        return None
    plain = (node.meta[DESC] for node in nodes[: len(shortened.inputs)])
    if not all(isinstance(target, PlainAOTInput) for target in plain):
        return None
    if _gradients(result) not in (0, len(shortened.inputs)):
        return None
    if not all(target is None or _moved(target, shortened.inputs) for target in result.meta[DESC]):
        return None
    at = {placeholders[index]: node for index, node in zip(shortened.inputs, nodes, strict=False)}
    inputs = [
        [tuple(at[node] for node in stack[index].inputs) for index in kept_layers(stack)]
        for stack in stacks
    ]
    proven = joint_stacks(joint.graph, labels, inputs)
    if proven is None:
        return None
    return _Lengthening(joint, shortened, stacks, proven, labels, placeholders, values).module()


def _moved(target: object, places: Sequence[int]) -> Any:
    """The description of an output, of a graph whose inputs are at other `places`; None if there
    is none, or none that is known here."""
    if isinstance(target, PlainAOTOutput):
        return target
    if isinstance(target, GradAOTOutput) and isinstance(target.grad_of, PlainAOTInput):
        return replace(target, grad_of=PlainAOTInput(places[target.grad_of.idx]))
    if isinstance(target, InputMutationAOTOutput) and isinstance(
        target.mutated_input, PlainAOTInput
    ):
        return replace(target, mutated_input=PlainAOTInput(places[target.mutated_input.idx]))
    return None


@dataclass
class _Copies:
    """The nodes of a whole stack, by layer, as far as they are there."""

    forward: dict[int, list[fx.Node]]
    backward: dict[int, list[fx.Node]]
    inputs: dict[int, list[fx.Node]]

    def at(self, layer: int, address: Address) -> fx.Node:
        kind, step, place = address
        kinds = {"forward": self.forward, "backward": self.backward, "input": self.inputs}
        return kinds[kind][layer + step][place]


class _Lengthening:
    """Copy the joint graph, and layers of stacks as often as they are there."""

    def __init__(
        self,
        joint: fx.GraphModule,
        shortened: Shortened,
        stacks: Sequence[Stack],
        proven: Sequence[JointStack],
        labels: Mapping[fx.Node, Label],
        placeholders: Sequence[fx.Node],
        values: Sequence[Tensor],
    ) -> None:
        self.joint, self.shortened, self.labels = joint, shortened, labels
        self.stacks, self.proven = stacks, proven
        self.placeholders, self.values = placeholders, values
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}  # of nodes of the joint graph
        self.inputs: dict[fx.Node, fx.Node] = {}  # for placeholders of the traced graph
        self.further: Counter[str] = Counter()  # by how much names are counted up
        self.whole = [_Copies({}, {}, {}) for _ in stacks]
        self.place = {  # of every joint operator in a stack: which, backward, layer that stays
            node: (number, backward, layer)
            for number, stack in enumerate(proven)
            for backward, layers in enumerate((stack.forward, stack.backward))
            for layer, nodes in enumerate(layers)
            for node in nodes
        }

    def module(self) -> fx.GraphModule:
        self._take_inputs()
        before: tuple[int, int, int] | None = None
        for node in self.joint.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            here = self.place.get(node)
            if before is not None and here != before:
                number, backward, layer = before
                if layer == (THIRD if backward else SECOND):
                    self._insert(number, bool(backward))
            before = here
            copy = self._copy(node, partial(self._read, here))
            if here is not None:
                number, backward, layer = here
                index = kept_layers(self.stacks[number])[layer]
                whole = self.whole[number]
                (whole.backward if backward else whole.forward).setdefault(index, []).append(copy)
            self.copies[node] = copy
        self._return()
        return module_of(self.graph, self.joint)

    def _take_inputs(self) -> None:
        """Make the placeholders of all layers, and those that AOTAutograd added."""
        nodes = list(self.joint.graph.find_nodes(op="placeholder"))
        stay = dict(zip(self.shortened.inputs, nodes, strict=False))
        templates = {
            node: stay_node
            for number, stack in enumerate(self.stacks)
            for index in left_out(stack)
            for node, stay_node in zip(
                stack[index].inputs, self.proven[number].inputs[SECOND], strict=True
            )
        }
        for index, (node, value) in enumerate(zip(self.placeholders, self.values, strict=True)):
            template = stay.get(index) or templates[node]
            training = template.name.startswith(INPUTS)
            copy = self.graph.placeholder(f"{INPUTS}{index + 1}" if training else f"arg{index}_1")
            copy.meta = dict(template.meta) | {DESC: PlainAOTInput(index)}
            if index in stay:
                self.copies[template] = copy
            else:
                copy.meta["val"] = value
            self.inputs[node] = copy
        for node in nodes[len(self.shortened.inputs) :]:
            self.copies[node] = self.graph.node_copy(node)
        for stack, whole in zip(self.stacks, self.whole, strict=True):
            for index, layer in enumerate(stack):
                whole.inputs[index] = [self.inputs[node] for node in layer.inputs]

    def _read(self, reader: tuple[int, int, int] | None, node: fx.Node) -> fx.Node:
        """What a node that stays reads: of a layer in the middle, its new neighbour."""
        place = self.place.get(node)
        if place is None or reader is None or reader[0] != place[0]:
            return self.copies[node]
        (number, backward, layer), read_by = place, reader[2]
        out, proven = left_out(self.stacks[number]), self.proven[number]
        if backward and (layer, read_by) == (THIRD, SECOND):
            return self.whole[number].backward[out.start][proven.backward[THIRD].index(node)]
        if not backward and (layer, read_by) == (SECOND, THIRD):
            return self.whole[number].forward[out.stop - 1][proven.forward[SECOND].index(node)]
        return self.copies[node]

    def _insert(self, number: int, backward: bool) -> None:
        """Copy the layer that came last as often as layers were left out behind it."""
        stack, proven, whole = self.stacks[number], self.proven[number], self.whole[number]
        last, after = (THIRD, SECOND) if backward else (SECOND, THIRD)
        layers = proven.backward if backward else proven.forward
        addresses, steps = proven.addresses(last), _steps(layers[last], layers[after])
        template = stack[kept_layers(stack)[last]]
        out = left_out(stack)
        for index in reversed(out) if backward else out:

            def read(node: fx.Node, index: int = index) -> fx.Node:
                address = addresses.get(node)
                return self.copies[node] if address is None else whole.at(index, address)

            self.further.update(steps)
            annotated = _Annotations(template, stack[index])
            nodes = (whole.backward if backward else whole.forward)[index] = []
            for node in layers[last]:
                copy = self._copy(node, read)
                annotated.write(copy.meta, self.labels.get(node))
                nodes.append(copy)

    def _copy(self, node: fx.Node, read: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Append a copy, called as if all before it had been traced."""
        args, kwargs = map_arg((node.args, node.kwargs), read)
        stem, count = _numbered(node.name)
        count += self.further[stem]
        name = f"{stem}_{count}" if count > 0 else stem
        copy = self.graph.create_node(node.op, node.target, args, kwargs, name)
        copy.meta = {key: value for key, value in node.meta.items() if key not in _PASSING}
        return copy

    def _return(self) -> None:
        """Return what the joint graph does, with the gradients of all inputs in their order."""
        result = self.joint.graph.output_node()
        returned: list[fx.Node | None] = list(result.args[0])  # type: ignore[arg-type]
        values = [value and self.copies[value] for value in returned]
        targets = [_moved(target, self.shortened.inputs) for target in result.meta[DESC]]
        if count := _gradients(result):
            position = {node: index for index, node in enumerate(self.placeholders)}
            pairs = list(zip(values[-count:], targets[-count:], strict=True))
            gradients = dict(zip(self.shortened.inputs, pairs, strict=True))
            for stack, proven, whole in zip(self.stacks, self.proven, self.whole, strict=True):
                template = [position[node] for node in stack[kept_layers(stack)[SECOND]].inputs]
                for layer in left_out(stack):
                    for node, place, like in zip(
                        stack[layer].inputs, proven.gradients, template, strict=True
                    ):
                        index = position[node]
                        value = None if place is None else whole.backward[layer][place]
                        target = gradients[like][1] and GradAOTOutput(PlainAOTInput(index))
                        gradients[index] = value, target
            ordered = [gradients[index] for index in range(len(self.placeholders))]
            values[-count:] = [value for value, _ in ordered]
            targets[-count:] = [target for _, target in ordered]
        self.graph.output(values).meta = dict(result.meta) | {DESC: targets}


def _gradients(result: fx.Node) -> int:
    """How many of the last outputs are gradients of inputs, or stand where there is none."""
    targets = reversed(result.meta[DESC])
    return len(list(takewhile(lambda t: t is None or isinstance(t, GradAOTOutput), targets)))


@dataclass(frozen=True)
class _Annotations:
    """What AOTAutograd copies from the operators of a layer, for another layer equal to it."""

    template: Layer
    layer: Layer

    def write(self, meta: dict[str, Any], label: Label | None) -> None:
        """Replace what a node has of the template's operator.

        Args:
            label: of that; None for a sum of gradients, which has the line of what is summed.
        """
        if label is not None:
            own = self.layer.operators[label.place].meta
            for key in ("stack_trace", CUSTOM):
                if key in meta and key in own:
                    meta[key] = own[key]
            return
        line, note, more = (meta.get("stack_trace") or "").partition(GRADIENT_SUM)
        if note:
            meta["stack_trace"] = self._lines.get(line.rstrip(), line) + note + more

    @cached_property
    def _lines(self) -> dict[str, str]:
        pairs = zip(self.template.operators, self.layer.operators, strict=True)
        lines = ((a.meta.get("stack_trace"), b.meta.get("stack_trace")) for a, b in pairs)
        return {a.rstrip(): b.rstrip() for a, b in lines if a and b}


def _steps(nodes: Nodes, after: Nodes) -> Counter[str]:
    """By how much a layer counts names up that PyTorch numbers."""
    steps: Counter[str] = Counter()
    for node, later in zip(nodes, after, strict=True):
        (stem, count), (other, further) = _numbered(node.name), _numbered(later.name)
        if stem == other:
            steps[stem] = further - count
    return steps


def _numbered(name: str) -> tuple[str, int]:
    """The name that PyTorch counts, and the count; the first node has no number."""
    stem, _, count = name.rpartition("_")
    return (stem, int(count)) if stem and count.isdecimal() else (name, 0)
