"""Write the streams of a program, from the host and to it.

Before   parts of a capture whose placeholders and outputs are described
After    the same, with an Input for every argument, random key and accumulation weight; an Output
         for everything returned, and for every input that the model changes, with the rule of its
         return
Keeps    the order of arguments and of returned values.
Source   PopTorch user guide, "Output mode".
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx

from ipu_dynamo.capture.capture import ACCUMULATION_WEIGHT, STREAMED, Joint, Placeholder
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import draws
from ipu_dynamo.ops.library.replica_collectives import all_to_all_op
from ipu_dynamo.options import Options
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Partitioned
from ipu_dynamo.program import Input, Output, Returns, TensorType

_FROM_SHAPE = frozenset(  # read the shape and dtype of their first argument, not its values
    {
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
    }
)


def _inputs(partitioned: Partitioned) -> list[Input]:
    """The streams to the IPUs."""
    capture = partitioned.capture
    sources = {
        "input": "host",
        "random_key": "random",
        "replica": "replica",
        "accumulation": "accumulation",
    }
    streams = [
        Input(
            role.name,
            TensorType.of(node.meta["val"]),
            sources[role.kind],  # type: ignore[arg-type]
            overlap=capture.report.overlaps.get(("input", role.name), "no_overlap"),
        )
        for node, role in capture.roles().items()
        if role.kind in sources
    ]
    read = any(ACCUMULATION_WEIGHT in part.reads for part in partitioned.parts)
    if read and ACCUMULATION_WEIGHT not in {s.name for s in streams}:
        weight = TensorType(torch.float32, ())
        streams.append(Input(ACCUMULATION_WEIGHT, weight, "accumulation"))
    return streams


def _outputs(capture: Joint, changed: Collection[str], options: Options) -> list[Output]:
    """The streams to the host; `changed` are the inputs that get a new value."""
    mode: Returns = options.returns(capture.training)  # type: ignore[assignment]
    varying = _varying(capture, options.replica_groups)
    anchors = {stream: options.anchors[short] for short, stream in capture.report.anchors.items()}
    found = []
    for node, role in zip(capture.returned, capture.outputs, strict=True):
        if node is None:
            continue
        type_ = TensorType.of(node.meta["val"])
        if role.kind == "value":
            if printing := capture.report.prints.get(role.name):
                found.append(Output(role.name, type_, "all", printing=printing))
                continue
            anchor = anchors.get(role.name)
            rule, period = mode, options.return_period
            if anchor is not None:
                rule, period = anchor.returns, anchor.period
            returns = rule if node in varying else "once"
            overlap = capture.report.overlaps.get(("output", role.name), "no_overlap")
            found.append(Output(role.name, type_, returns, period, overlap=overlap))
        elif role.name in changed:
            found.append(Output(role.name, type_, "all", mutates=True))
    return found


def _varying(capture: Joint, grouped: Collection[str]) -> set[fx.Node]:
    """Nodes that depend on an input, a floating-point parameter or buffer, a variable that the
    model changes or groups of replicas have for themselves, a random number, or the number of the
    replica, by which an all-to-all chooses a part."""
    changed = {role.name for role in capture.outputs if role.kind == "mutation"}
    roles = capture.roles().items()
    varying = {
        node
        for node, role in roles
        if role.name in changed or role.name in grouped or _varies(role, node)
    }
    for node in capture.graph.graph.nodes:
        if node.target in _FROM_SHAPE:
            continue
        own = draws(node) or node.target is all_to_all_op
        if own or varying.intersection(node.all_input_nodes):
            varying.add(node)
    return varying


def _varies(role: Placeholder, node: fx.Node) -> bool:
    if role.kind == "constant":
        return False
    return role.kind in STREAMED or bool(node.meta["val"].is_floating_point())


class EmitStreams(Pass):
    """The pass."""

    level = "parts"
    needed = "a program says what the host brings and gets"

    options: Options

    def __call__(self, partitioned: Partitioned) -> Partitioned:
        inputs = tuple(_inputs(partitioned))
        outputs = tuple(_outputs(partitioned.capture, partitioned.changed, self.options))
        return replace(partitioned, inputs=inputs, outputs=outputs)
