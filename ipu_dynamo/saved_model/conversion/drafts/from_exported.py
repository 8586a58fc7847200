"""Take an exported program apart into a draft: one flat graph of named nodes that changes nothing.

Before   placeholders of parameters, buffers, constants and inputs; checks of types in the graph
After    placeholders of inputs, and of tensors that are read; every node named
Keeps    operators and their order, values, names, source lines.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.saved_model.conversion.drafts.copied_constants import CONSTANT
from ipu_dynamo.saved_model.conversion.drafts.draft import Draft
from ipu_dynamo.saved_model.conversion.drafts.node_groups import KIND, set_name
from ipu_dynamo.saved_model.exported.node_names import Kind, placeholder_names
from ipu_dynamo.saved_model.exported.program_interface import user_inputs
from ipu_dynamo.saved_model.signature import Signature

# checks of types: the values have these types anyway, and a conversion changes them
_TYPE_CHECKS = (aten._assert_tensor_metadata.default,)


def from_exported(signature: Signature) -> Draft:
    """The draft of a signature, which shares tensors with it.

    Raises:
        NotImplementedError: an input is a number that calls choose, or the program writes buffers.
        ValueError: two nodes read each other.
    """
    program = signature.program
    _check_writes(program)
    graph, values = fx.Graph(), _constants(program)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs: dict[str, fx.Node] = {}
    tensors: dict[fx.Node, Tensor] = {}
    fx_names = [name for name, _ in user_inputs(program)]
    own_names = {fx_names[spec.position]: name for name, spec in signature.inputs.items()}
    names = placeholder_names(program, own_names, signature.parameter_names)
    for name, spec in signature.inputs.items():
        node = nodes[fx_names[spec.position]]
        inputs[name] = values[node] = _placeholder(graph, node, names[node.name], Kind.INPUT)
    for node, tensor, constant in _held(program):
        if node.users:
            values[node] = _placeholder(graph, node, names[node.name], Kind.PARAM)
            values[node].meta[CONSTANT] = constant
            tensors[values[node]] = tensor
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target not in _TYPE_CHECKS:
            values[node] = graph.node_copy(node, lambda n: values[n])
    outputs: dict[str, fx.Node] = {}
    flat = program.graph.output_node().args[0]
    for name, spec in signature.outputs.items():
        outputs[name] = values[flat[spec.position]]
    graph.output(tuple(outputs.values()))
    graph.eliminate_dead_code()
    graph.lint()
    return Draft(
        module_of(graph),
        inputs,
        tensors,
        outputs,
        range_constraints=program.range_constraints,
        defaults=signature.defaults,
        method_name=signature.method_name,
    )


def _check_writes(program: ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind != OutputKind.USER_OUTPUT:
            raise NotImplementedError(
                f"the program writes {spec.target!r}; convert one that writes no buffers (export "
                "the module in eval mode)"
            )
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NotImplementedError(f"node {node.name!r} is a {node.op}, which is not converted")


def _constants(program: ExportedProgram) -> dict[fx.Node, Any]:
    """The values of inputs that are no tensors: None and numbers, which a program has fixed."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    constants = {}
    for name, value in user_inputs(program):
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise NotImplementedError(f"input {name!r} is a number that calls choose")
        if not isinstance(value, Tensor):
            constants[nodes[name]] = value
    return constants


def _held(program: ExportedProgram) -> list[tuple[fx.Node, Tensor, bool]]:
    """Placeholders of tensors that the program holds, the tensors, and whether one is a constant:
    it is not part of the state that a module saves."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values = {**program.constants, **dict(program.state_dict)}
    return [
        (
            nodes[spec.arg.name],
            values[str(spec.target)].detach(),
            spec.kind == InputKind.CONSTANT_TENSOR
            or (spec.kind == InputKind.BUFFER and not spec.persistent),
        )
        for spec in program.graph_signature.input_specs
        if spec.kind != InputKind.USER_INPUT
    ]


def _placeholder(graph: fx.Graph, source: fx.Node, name: str, kind: Kind) -> fx.Node:
    node = graph.node_copy(source)
    node.meta = {"val": source.meta["val"], KIND: kind}
    set_name(node, name)
    return node
