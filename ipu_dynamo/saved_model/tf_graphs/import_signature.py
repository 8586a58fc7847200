"""Make an exported program of a signature that TensorFlow saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ipu_dynamo.saved_model.index import SignatureEntry
from ipu_dynamo.saved_model.node_names import NAME, name_calls
from ipu_dynamo.saved_model.program_interface import tensor_inputs, tensor_outputs
from ipu_dynamo.saved_model.tf_graphs.dtypes import torch_dtype
from ipu_dynamo.saved_model.tf_graphs.flatten import Flattening, TfNode
from ipu_dynamo.saved_model.tf_graphs.graph_module import GraphModule, unsupported
from ipu_dynamo.saved_model.tf_graphs.meta_graphs import Border, TfMetaGraph, TfSignature
from ipu_dynamo.saved_model.tf_graphs.variables import Variables

_ROWS, _LENGTH, _PIXELS = 3, 8, 64  # examples of sizes that calls choose


@dataclass(frozen=True, slots=True)
class FlatSignature:
    """The nodes of a signature, its placeholders and results, in the order of their keys."""

    nodes: list[TfNode]
    inputs: list[TfNode]
    outputs: list[tuple[TfNode, int]]


def flatten_signature(graph: TfMetaGraph, signature: TfSignature) -> FlatSignature:
    """The nodes that the outputs of a signature depend on.

    Raises:
        ValueError: a node or function is missing.
    """
    fed = {border.tensor: key for key, border in signature.inputs.items()}
    flat = Flattening(graph.graph, fed)
    outputs = [flat.result(border.tensor) for border in signature.outputs.values()]
    inputs = []
    for key in signature.inputs:
        if key not in flat.inputs:  # no output depends on it
            flat.inputs[key] = TfNode(key, "Placeholder", {})
        inputs.append(flat.inputs[key])
    return FlatSignature(flat.nodes, inputs, outputs)


def import_signature(
    folder: Path, graph: TfMetaGraph, signature: TfSignature
) -> tuple[ExportedProgram, SignatureEntry]:
    """The program of a signature, and what an index says of it.

    Raises:
        NotImplementedError: an operator, type or form is not supported; all operators are listed.
        ValueError: the files are damaged.
    """
    flat = flatten_signature(graph, signature)
    if missing := unsupported(flat.nodes):
        listed = ", ".join(f"{op} ({name!r})" for op, name in sorted(missing.items()))
        raise NotImplementedError(f"{folder}: operators that are not supported: {listed}")
    module = GraphModule(flat.nodes, flat.inputs, flat.outputs, Variables(folder)).eval()
    borders = list(signature.inputs.items())
    examples = [_example(key, border) for key, border in borders]
    with torch.no_grad():
        module(*examples)  # makes constants that are used as tensors parts of the module
    shapes = [_dynamic(border) for _, border in borders]
    module.annotated = True
    with torch.no_grad(), torch.fx.traceback.preserve_node_meta():
        program = torch.export.export(
            module, tuple(examples), dynamic_shapes=(tuple(shapes),), strict=False
        )
    _keep_names_only(program)
    name_calls(program)
    _check_sizes(program, borders)
    inputs, outputs = tensor_inputs(program), tensor_outputs(program)
    entry = SignatureEntry(
        "",
        "",
        {key: inputs[position] for position, (key, _) in enumerate(borders)},
        {key: outputs[position] for position, key in enumerate(signature.outputs)},
        signature.method_name,
        module.parameter_names,
    )
    return program, entry


def _example(key: str, border: Border) -> Tensor:
    if border.shape is None:
        raise NotImplementedError(f"input {key!r} has no known number of dimensions")
    usual = _PIXELS if len(border.shape) == 4 else _LENGTH
    sizes = [
        (usual if d else _ROWS) if size is None else size for d, size in enumerate(border.shape)
    ]
    return torch.zeros(sizes, dtype=torch_dtype(border.dtype, f"input {key!r}"))


def _dynamic(border: Border) -> dict[int, Any]:
    return {d: Dim.AUTO for d, size in enumerate(border.shape or ()) if size is None}


def _check_sizes(program: ExportedProgram, borders: Sequence[tuple[str, Border]]) -> None:
    """Refuse a size that calls choose in TensorFlow, and that the program has fixed."""
    specs = tensor_inputs(program)
    for position, (key, border) in enumerate(borders):
        for wanted, size in zip(border.shape or (), specs[position].shape, strict=True):
            if wanted is None and size is not None:
                raise NotImplementedError(
                    f"input {key!r} has a size that calls choose, and the program needs {size}"
                )


def _keep_names_only(program: ExportedProgram) -> None:
    """Take out what PyTorch notes beside the names."""
    for node in program.graph.nodes:
        custom = node.meta.pop("custom", None)
        if isinstance(custom, dict) and NAME in custom:
            node.meta["custom"] = {NAME: custom[NAME]}
