"""Read from an exported program which tensors go in and out, and under which names."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    TensorArgument,
)

from ipu_dynamo.ops.private.graphs import pytree
from ipu_dynamo.saved_model.exported.flat_names import Leaf, named_inputs, named_outputs
from ipu_dynamo.saved_model.files.tensor_spec import TensorSpec, spec_of


@dataclass(frozen=True, slots=True)
class Interface:
    """Tensors by name, in the order of the program, and the nodes of inputs by position."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]


def interface_of(program: ExportedProgram) -> Interface:
    """The inputs and outputs of a program, named by its arguments and results.

    Raises:
        ValueError: two have one name, or a result is no tensor.
    """
    inputs, outputs = tensor_inputs(program), tensor_outputs(program)
    in_names, out_names = _names(program)
    return Interface(
        {in_names[position]: spec for position, spec in inputs.items()},
        {out_names[position]: spec for position, spec in outputs.items()},
    )


def tensor_inputs(program: ExportedProgram) -> dict[int, TensorSpec]:
    """The tensors among the user inputs, by position."""
    return {
        position: spec_of(position, value)
        for position, (_, value) in enumerate(user_inputs(program))
        if isinstance(value, Tensor)
    }


def user_inputs(program: ExportedProgram) -> list[tuple[str, Any]]:
    """The user inputs, by the names of their nodes: values of the graph, or constants."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    result = []
    for spec in program.graph_signature.input_specs:
        if spec.kind != InputKind.USER_INPUT:
            continue
        constant = isinstance(spec.arg, ConstantArgument)
        value = spec.arg.value if constant else nodes[spec.arg.name].meta["val"]
        result.append((spec.arg.name, value))
    return result


def tensor_outputs(program: ExportedProgram) -> dict[int, TensorSpec]:
    """The tensors among the user outputs, by position.

    Raises:
        ValueError: a result is a number.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    specs = [s for s in program.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
    result = {}
    for position, spec in enumerate(specs):
        if isinstance(spec.arg, TensorArgument):
            result[position] = spec_of(position, nodes[spec.arg.name].meta["val"])
        elif not (isinstance(spec.arg, ConstantArgument) and spec.arg.value is None):
            raise ValueError(f"result {position} is no tensor ({type(spec.arg).__name__})")
    return result


def user_output_nodes(program: ExportedProgram) -> dict[int, str]:
    """The nodes that give the tensors among the user outputs, by position."""
    specs = [s for s in program.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
    return {i: s.arg.name for i, s in enumerate(specs) if isinstance(s.arg, TensorArgument)}


def _names(program: ExportedProgram) -> tuple[dict[int, str], dict[int, str]]:
    """The names of inputs and outputs, by position."""
    call = program.module_call_graph[0].signature
    if call is None:
        raise ValueError("the program does not say what its arguments are")
    args, kwargs = pytree.tree_unflatten(
        [Leaf(i) for i in range(call.in_spec.num_leaves)], call.in_spec
    )
    result = pytree.tree_unflatten(
        [
            Leaf(i) if i in tensor_outputs(program) else None
            for i in range(call.out_spec.num_leaves)
        ],
        call.out_spec,
    )
    inputs = named_inputs(args, kwargs, list(call.forward_arg_names or ()))
    outputs = named_outputs(result)
    return {int(v): k for k, v in inputs.items()}, {int(v): k for k, v in outputs.items()}
