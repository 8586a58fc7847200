"""Write the marks of nodes that passes read as text, and read them back.

A mark is an entry of a node's meta, such as its stage, its direction or its group. Entries that no
pass reads are in no text.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ipu_dynamo.capture.capture import (
    BACKWARD,
    MATMUL_NAME,
    NAME,
    STAGE,
    START,
    WANTED_GRADIENTS,
)
from ipu_dynamo.capture.layers.dynamic_slices import WINDOW
from ipu_dynamo.capture.private.aot import AOTInput, AOTOutput, TangentAOTInput
from ipu_dynamo.capture.private.tracing import fake_mode
from ipu_dynamo.capture.scopes import SCOPE
from ipu_dynamo.ops.control_flow import FLOW
from ipu_dynamo.ops.marks.markers import autograd_function_op, function_of
from ipu_dynamo.ops.operator_costs import ANCHORED
from ipu_dynamo.ops.private.node_meta import (
    CUSTOM,
    DESC,
    IS_GRADIENT_SUM,
    POLICY,
    TAG,
    direction_tag,
)
from ipu_dynamo.ops.serialized_loss import CUTS_ROWS
from ipu_dynamo.passes.aot.annotate_stages import CUSTOM_STAGE
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import STREAM
from ipu_dynamo.passes.joint.schedule_convolution_groups import PARTIALS
from ipu_dynamo.passes.traced.tag_convolution_groups import Member
from ipu_dynamo.program.machine_marks import MACHINE, MachineMark
from ipu_dynamo.program.text.graph_text import (
    GROUP,
    MEMORY,
    OWN_MEMORY,
    RECOMPUTED,
    SERIAL_STEP,
    GraphForm,
)
from ipu_dynamo.program.text.records import build

MARKS: dict[str, Any] = {  # keys of meta that passes read, with the types of their values
    SCOPE: str,
    NAME: str,
    MATMUL_NAME: str,
    WANTED_GRADIENTS: tuple[str, ...],
    STAGE: int,
    START: bool,
    BACKWARD: bool,
    RECOMPUTED: bool,
    GROUP: str,
    PARTIALS: str,
    OWN_MEMORY: bool,
    MACHINE: str,
    SERIAL_STEP: str,
    MEMORY: float,
    STREAM: tuple[int, int],
    CUTS_ROWS: bool,
    ANCHORED: bool,
    WINDOW: bool,
    CUSTOM: Mapping[str, int | str | Member | tuple[int, int, int]],
    TAG: str,
    IS_GRADIENT_SUM: bool,
    POLICY: str,
    DESC: AOTInput | tuple[AOTOutput | None, ...],
}


def graph_form(attributes: Mapping[str, torch.Tensor]) -> GraphForm:
    """The form of graphs at these levels; all values have one mode."""
    return GraphForm(
        marks=lambda node: dict(_marks(node)),
        meta=_meta,
        of_functions=False,
        arguments=_arguments,
        mode=fake_mode(),
        attributes=attributes,
    )


def _marks(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The entries of a node's meta that passes read."""
    for key in MARKS:
        value = node.meta.get(key)
        if value is not None and (written := _written(key, value, node)) is not None:
            yield key, written


def _written(key: str, value: Any, node: fx.Node) -> Any:
    """An entry of meta as a text has it; None: other parts of the text say the same.

    Inputs and outputs are described by AOTAutograd or have roles. A described graph has a
    description at its output. In others only the gradients that the graph takes are described.
    """
    described = DESC in node.graph.output_node().meta
    if key == WANTED_GRADIENTS:
        return tuple(sorted(value))
    if key == POLICY:
        return value.name
    if key == CUSTOM:
        return _custom(value, node.meta) or None
    if key == TAG:
        known = node.op == "placeholder" and not described
        known |= BACKWARD in node.meta and value == direction_tag(node.meta[BACKWARD])
        return None if known else value
    if key == DESC:
        if not described and not isinstance(value, TangentAOTInput):
            return None
        return tuple(value) if isinstance(value, list) else value
    return value


def _custom(entries: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of meta["custom"] that passes read; a stage only until the node has it."""
    known = {key: value for key, value in entries.items() if isinstance(value, int | str | Member)}
    if BACKWARD in meta and STAGE in meta and known.get(CUSTOM_STAGE) == meta[STAGE]:
        del known[CUSTOM_STAGE]
    return known


def _meta(marks: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `_marks`."""
    meta = {}
    for key, value in marks.items():
        if key not in MARKS:
            raise ValueError(f"no pass reads a mark {key}; those are {', '.join(MARKS)}")
        meta[key] = build(value, MARKS[key], key)
    if MACHINE in meta:
        MachineMark.parse(meta[MACHINE])
    if WANTED_GRADIENTS in meta:
        meta[WANTED_GRADIENTS] = frozenset(meta[WANTED_GRADIENTS])
    if POLICY in meta:
        if meta[POLICY] not in CheckpointPolicy.__members__:
            raise ValueError(f"{POLICY} is one of {', '.join(CheckpointPolicy.__members__)}")
        meta[POLICY] = CheckpointPolicy[meta[POLICY]]
    if BACKWARD in meta:
        meta.setdefault(TAG, direction_tag(meta[BACKWARD]))
        if STAGE in meta:
            meta[CUSTOM] = {CUSTOM_STAGE: meta[STAGE], **meta.get(CUSTOM, {})}
    if isinstance(meta.get(DESC), tuple):
        meta[DESC] = list(meta[DESC])
    return meta


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node. Handles, which only this process knows, are replaced."""
    if FLOW in node.meta:
        return (node.args[0], [n for n in node.graph.nodes if FLOW in n.meta].index(node))
    if node.target is autograd_function_op:
        return (node.args[0], function_of(node.args[1]))  # type: ignore[arg-type]
    return node.args
