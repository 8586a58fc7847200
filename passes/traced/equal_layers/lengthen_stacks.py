"""Put the layers that were left out into the joint graph.

Before   def all_layers(%x: f32[n]):
             %y = aten.tanh(aten.tanh(aten.tanh(aten.tanh(aten.tanh(%x)))))
             return %y
         capture.whole = all_layers
         %a = aten.tanh(%x: f32[n])  in forward  with meta["custom"] = {"ipu_layer": (0, 0, 0)}
         %b = aten.tanh(%a)          in forward  with meta["custom"] = {"ipu_layer": (0, 1, 0)}
         %c = aten.tanh(%b)          in forward  with meta["custom"] = {"ipu_layer": (0, 2, 0)}
         %d = aten.tanh(%c)          in forward  with meta["custom"] = {"ipu_layer": (0, 3, 0)}
         return %d
After    capture.whole = None
         %y = aten.tanh(aten.tanh(aten.tanh(aten.tanh(aten.tanh(%x)))))  in forward
         return %y
Keeps    the graph that AOTAutograd would have made of all layers: the same operators in the same
         order, with the same values, descriptions and names. A copy has the source line, stage and
         other annotations of its own layer.
Source   design of this project: autograd makes the same operators of equal layers.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import Joint, OutputRole, Traced
from ipu_dynamo.capture.private.aot import PlainAOTInput
from ipu_dynamo.capture.private.tracing import fake_mode_of
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
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.traced.differentiate import Differentiate, names_of
from ipu_dynamo.passes.traced.equal_layers.find_stacks import Stack, StackLayer, find_stacks
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
    kept_layers,
    left_out,
    take_label,
)

log = logging.getLogger(__name__)
_PASSING = (SEQ_NR, FROM_NODE)  # keys of meta that say how AOTAutograd made a node


class LengthenStacks(Pass):
    """The pass. If the layers of a stack prove to be different, it differentiates all of them.

    Args:
        may_train_nothing: accept a loss that depends on no parameter, as `Differentiate` does.
    """

    level = "joint"
    needed = "the model would have four layers of many"

    may_train_nothing: bool = False

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return capture.whole is not None

    def __call__(self, capture: Joint) -> Joint:
        if capture.whole is None:
            return capture
        whole, stacks = capture.whole, find_stacks(capture.whole)
        labels = {
            node: label
            for node in capture.graph.graph.nodes
            if (label := take_label(node)) is not None and not node.meta.get(IS_GRADIENT_SUM)
        }
        proven = plan(capture, whole, stacks, labels)
        if proven is None:
            log.debug("layers are equal, but not their gradients: all are differentiated")
            return Differentiate(self.may_train_nothing)(whole)
        return _Lengthening(capture, whole, stacks, proven, labels).lengthened()


def plan(
    joint: Joint, whole: Traced, stacks: Sequence[Stack], labels: dict[fx.Node, Label]
) -> list[JointStack] | None:
    """The stacks in the joint graph; None if the layers of one are not equal there."""
    if any(role.kind == "token" for role in joint.placeholders):
        return None
    at = {role.name: node for node, role in joint.roles().items()}
    names = {node: role.name for node, role in whole.roles().items()}
    inputs = [
        [tuple(at[names[node]] for node in stack[index].inputs) for index in kept_layers(stack)]
        for stack in stacks
    ]
    return joint_stacks(joint, labels, inputs)


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
        joint: Joint,
        model: Traced,
        stacks: Sequence[Stack],
        proven: Sequence[JointStack],
        labels: Mapping[fx.Node, Label],
    ) -> None:
        self.joint, self.labels, self.model = joint, labels, model
        self.stacks, self.proven = stacks, proven
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

    def lengthened(self) -> Joint:
        """The joint graph of all layers."""
        self._take_inputs()
        before: tuple[int, int, int] | None = None
        for node in self.joint.graph.graph.nodes:
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
        outputs = self._return()
        report = self.joint.report
        report.tensors, report.gradients = self.model.report.tensors, self._gradients(outputs)
        further = (role for role in self.joint.placeholders if role.kind == "tangent")
        return replace(
            self.joint,
            graph=module_of(self.graph, self.joint.graph),
            placeholders=(*self.model.placeholders, *further),
            outputs=outputs,
            whole=None,
        )

    def _take_inputs(self) -> None:
        """Make the placeholders of all layers, and those that AOTAutograd added."""
        stay = {role.name: node for node, role in self.joint.roles().items()}
        templates = {
            node: stay_node
            for number, stack in enumerate(self.stacks)
            for index in left_out(stack)
            for node, stay_node in zip(
                stack[index].inputs, self.proven[number].inputs[SECOND], strict=True
            )
        }
        for index, (node, role) in enumerate(self.model.roles().items()):
            template = stay.pop(role.name, None)
            like = templates[node] if template is None else template
            training = like.name.startswith(INPUTS)
            copy = self.graph.placeholder(f"{INPUTS}{index + 1}" if training else f"arg{index}_1")
            copy.meta = dict(like.meta) | {DESC: PlainAOTInput(index)}
            if template is None:
                copy.meta["val"] = _another(like.meta["val"])
            else:
                self.copies[template] = copy
            self.inputs[node] = copy
        for node in stay.values():  # the gradient of the loss
            self.copies[node] = self.graph.node_copy(node)
        for stack, whole in zip(self.stacks, self.whole, strict=True):
            for index, layer in enumerate(stack):
                whole.inputs[index] = [self.inputs[node] for node in layer.inputs]

    def _read(self, reader: tuple[int, int, int] | None, node: fx.Node) -> fx.Node:
        """Return the input of a node that stays: in place of a middle layer its new neighbour."""
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
        """Copy the last layer before a gap once for each layer that was left out."""
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

    def _return(self) -> tuple[OutputRole, ...]:
        """Return the joint graph's results, with the gradients of all inputs in their order."""
        pairs = list(zip(self.joint.returned, self.joint.outputs, strict=True))
        gradients = {
            role.name: node and self.copies[node] for node, role in pairs if role.kind == "gradient"
        }
        names = {node: role.name for node, role in self.model.roles().items()}
        for stack, proven, whole in zip(self.stacks, self.proven, self.whole, strict=True):
            for layer in left_out(stack):
                for node, place in zip(stack[layer].inputs, proven.gradients, strict=True):
                    if place is not None:
                        gradients[names[node]] = whole.backward[layer][place]
        returned = [
            (node and self.copies[node], role) for node, role in pairs if role.kind == "mutation"
        ]
        returned += [
            (gradients[name], OutputRole("gradient", name))
            for name in names.values()
            if name in gradients
        ]
        returned += [
            (node and self.copies[node], role) for node, role in pairs if role.kind == "value"
        ]
        result = self.graph.output(tuple(node for node, _ in returned))
        result.meta = dict(self.joint.output_node.meta)
        return tuple(role for _, role in returned)

    def _gradients(self, outputs: Sequence[OutputRole]) -> tuple[str, ...]:
        """Return the parameters and values with a gradient.

        Those of a left-out layer have one if those of the second layer have one.
        """
        known = set(self.joint.report.gradients)
        second = {
            node: like
            for stack in self.stacks
            for layer in left_out(stack)
            for node, like in zip(stack[layer].operators, stack[SECOND].operators, strict=True)
        }
        values = (
            name
            for node in self.model.graph.graph.nodes
            if not known.isdisjoint(names_of(second.get(node, node)))
            for name in names_of(node)
        )
        trained = (role.name for role in outputs if role.kind == "gradient")
        return tuple(dict.fromkeys((*trained, *values)))


def _another(value: Tensor) -> Tensor:
    """A fake tensor like another one."""
    with fake_mode_of([value]):
        like = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return like.requires_grad_(value.requires_grad)


@dataclass(frozen=True)
class _Annotations:
    """The annotations that AOTAutograd copies from a layer's operators, for an equal layer."""

    template: StackLayer
    layer: StackLayer

    def write(self, meta: dict[str, Any], label: Label | None) -> None:
        """Replace the annotations that a node has from the template's operator.

        Args:
            label: of that operator; None for a sum of gradients, which has the line of its terms.
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
