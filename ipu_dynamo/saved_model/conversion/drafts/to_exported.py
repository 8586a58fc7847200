"""Make an exported program of a draft, with the entries for an index."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from ipu_dynamo.ops.private.graphs import pytree
from ipu_dynamo.ops.private.node_meta import CUSTOM, MODULE_STACK, TORCH_FN
from ipu_dynamo.saved_model.conversion.drafts.draft import HOST, Draft, Placement
from ipu_dynamo.saved_model.conversion.drafts.node_groups import name_of
from ipu_dynamo.saved_model.exported.program_interface import tensor_inputs, tensor_outputs
from ipu_dynamo.saved_model.files.tensor_spec import TensorSpec

DEVICE, IPU_NUMBER, STAGE = "ipu_device", "ipu_number", "ipu_stage"  # keys of meta["custom"]
_KEPT_META = ("val", CUSTOM, "stack_trace", MODULE_STACK, TORCH_FN)
_PART = re.compile(r"[A-Za-z0-9]\w{0,200}", re.ASCII)


class Exported:
    """A program with its entries for an index.

    Attributes:
        program: its inputs and outputs in the order of the draft.
        parameter_names: canonical names, where they are not the qualified ones with slashes.
    """

    def __init__(
        self,
        program: ExportedProgram,
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        parameter_names: Mapping[str, str],
    ) -> None:
        self.program, self.inputs, self.outputs = program, inputs, outputs
        self.parameter_names = parameter_names


def to_exported(draft: Draft) -> Exported:
    """The program of a draft; its tensors are shared."""
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    state: dict[str, Tensor] = {}
    parameter_names: dict[str, str] = {}
    input_specs: list[InputSpec] = []
    for node, tensor in draft.tensors.items():
        qualified = _qualified(name_of(node), state)
        if qualified.replace(".", "/") != name_of(node):
            parameter_names[qualified] = name_of(node)
        state[qualified] = tensor
        values[node] = copy = _copied(graph, node, {})
        input_specs.append(
            InputSpec(InputKind.BUFFER, TensorArgument(copy.name), qualified, persistent=True)
        )
    for node in draft.inputs.values():
        values[node] = copy = _copied(graph, node, {})
        input_specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(copy.name), None))
    for node in draft.graph.nodes:
        if node.op == "call_function":
            values[node] = copy = _copied(graph, node, values)
            copy.meta[CUSTOM] = {**copy.meta[CUSTOM], **_facts(draft.placement, name_of(node))}
    results = [values[node] for node in draft.outputs.values()]
    graph.output(tuple(results))
    graph.output_node().meta["val"] = tuple(node.meta["val"] for node in results)
    signature = ExportGraphSignature(
        input_specs,
        [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in results],
    )
    program = ExportedProgram(
        root=dict[str, Any](),
        graph=graph,
        graph_signature=signature,
        state_dict=state,
        range_constraints=dict(draft.range_constraints),
        module_call_graph=[ModuleCallEntry("", _call(signature))],
        constants={},
    )
    inputs, outputs = tensor_inputs(program), tensor_outputs(program)
    return Exported(
        program,
        {name: inputs[position] for position, name in enumerate(draft.inputs)},
        {name: outputs[position] for position, name in enumerate(draft.outputs)},
        parameter_names,
    )


def _facts(placement: Placement, name: str) -> dict[str, Any]:
    """The notes in a node about its device, IPU and stage."""
    facts: dict[str, Any] = {DEVICE: placement.devices.get(name, HOST)}
    if name in placement.ipus:
        facts[IPU_NUMBER] = placement.ipus[name]
    if name in placement.stages:
        facts[STAGE] = placement.stages[name]
    return facts


def _call(signature: ExportGraphSignature) -> ModuleCallSignature:
    inputs = [s.arg for s in signature.input_specs if s.kind == InputKind.USER_INPUT]
    outputs = [s.arg for s in signature.output_specs]
    names = [f"input_{index}" for index in range(len(inputs))]
    _, in_spec = pytree.tree_flatten(((0,) * len(inputs), {}))
    _, out_spec = pytree.tree_flatten((0,) * len(outputs))
    return ModuleCallSignature(inputs, outputs, in_spec, out_spec, names)


def _copied(graph: fx.Graph, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, lambda n: values[n])
    copy.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    return copy


def _qualified(name: str, taken: Mapping[str, Tensor]) -> str:
    """A name for a state dictionary: the canonical one with dots, where that is one."""
    parts = name.split("/")
    clash = any(t.startswith(f"{'.'.join(parts)}.") for t in taken) or any(
        ".".join(parts[:count]) in taken for count in range(1, len(parts) + 1)
    )
    if all(map(_PART.fullmatch, parts)) and not clash:
        return ".".join(parts)
    return f"tensor_{len(taken)}"
