"""Make an exported program of a signature that TensorFlow saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ipu_dynamo.ops.private.node_meta import CUSTOM
from ipu_dynamo.saved_model.exported.node_names import NAME, name_calls
from ipu_dynamo.saved_model.exported.program_interface import tensor_inputs, tensor_outputs
from ipu_dynamo.saved_model.files.index import SignatureEntry
from ipu_dynamo.saved_model.tf_graphs.dtypes import STRING, torch_dtype
from ipu_dynamo.saved_model.tf_graphs.features import FEATURES
from ipu_dynamo.saved_model.tf_graphs.flatten import Flattening, TfNode
from ipu_dynamo.saved_model.tf_graphs.graph_module import GraphModule, unsupported
from ipu_dynamo.saved_model.tf_graphs.meta_graphs import Border, TfMetaGraph, TfSignature
from ipu_dynamo.saved_model.tf_graphs.variables import Variables

_ROWS, _LENGTH, _PIXELS = 3, 8, 64  # examples of sizes that calls choose


@dataclass(frozen=True, slots=True)
class FlatSignature:
    """The nodes of a signature, with its placeholders and results.

    Attributes:
        inputs: by key, each with its entry in the signature. If the graph parses examples, their
            features are the inputs, in place of the examples' text.
        defaults: of features that an example need not have.
    """

    nodes: list[TfNode]
    inputs: dict[str, tuple[TfNode, Border]]
    outputs: list[tuple[TfNode, int]]
    defaults: dict[str, Tensor]


def flatten_signature(graph: TfMetaGraph, signature: TfSignature) -> FlatSignature:
    """The nodes that the outputs of a signature depend on.

    Raises:
        ValueError: a node or function is missing.
    """
    fed = {border.tensor: key for key, border in signature.inputs.items()}
    flat = Flattening(graph.graph, fed)
    outputs = [flat.result(border.tensor) for border in signature.outputs.values()]
    inputs = {
        key: (flat.inputs.get(key, TfNode(key, "Placeholder", {})), border)
        for key, border in signature.inputs.items()
    }
    parsers = [node for node in flat.nodes if FEATURES in node.attributes]
    if not parsers:
        return FlatSignature(flat.nodes, inputs, outputs, {})
    # nothing but a parser reads a text
    inputs = {key: value for key, value in inputs.items() if value[1].dtype != STRING}
    features, defaults = _features(parsers)
    nodes = [node for node in flat.nodes if node not in parsers]
    for node in nodes:
        node.inputs = [_fed(features, source) for source in node.inputs]
    outputs = [_fed(features, source) for source in outputs]
    for placeholder, border in features.values():
        if placeholder.name in inputs:
            raise ValueError(f"two inputs have the name {placeholder.name!r}")
        inputs[placeholder.name] = placeholder, border
    placeholders = [placeholder for placeholder, _ in features.values()]
    return FlatSignature([*placeholders, *nodes], inputs, outputs, defaults)


_Features = dict[tuple[TfNode, int], tuple[TfNode, Border]]


def _features(parsers: Sequence[TfNode]) -> tuple[_Features, dict[str, Tensor]]:
    """A placeholder for each dense feature that nodes parse, and the defaults that there are."""
    placeholders: _Features = {}
    defaults: dict[str, Tensor] = {}
    for node in parsers:
        for index, feature in node.attributes[FEATURES].items():
            border = Border("", feature.dtype, (None, *feature.shape))
            placeholders[node, index] = TfNode(feature.name, "Placeholder", {}), border
            if feature.default is not None:
                shape = [size or 1 for size in feature.shape]
                defaults[feature.name] = feature.default.reshape(shape)
    return placeholders, defaults


def _fed(features: _Features, source: tuple[TfNode, int]) -> tuple[TfNode, int]:
    """The source of an input, with features in place of a parser's results."""
    if source in features:
        return features[source][0], 0
    if FEATURES in source[0].attributes:
        raise NotImplementedError(f"node {source[0].name!r} gives sparse features")
    return source


def import_signature(
    folder: Path, graph: TfMetaGraph, signature: TfSignature
) -> tuple[ExportedProgram, SignatureEntry, dict[str, Tensor]]:
    """The program of a signature, its entry for an index, and defaults of inputs.

    Raises:
        NotImplementedError: an operator, type or form is not supported; all operators are listed.
        ValueError: the files are damaged.
    """
    flat = flatten_signature(graph, signature)
    if missing := unsupported(flat.nodes):
        listed = ", ".join(f"{op} ({name!r})" for op, name in sorted(missing.items()))
        raise NotImplementedError(f"{folder}: operators that are not supported: {listed}")
    placeholders = [node for node, _ in flat.inputs.values()]
    module = GraphModule(flat.nodes, placeholders, flat.outputs, Variables(folder)).eval()
    borders = [(key, border) for key, (_, border) in flat.inputs.items()]
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
    return program, entry, flat.defaults


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
        custom = node.meta.pop(CUSTOM, None)
        if isinstance(custom, dict) and NAME in custom:
            node.meta[CUSTOM] = {NAME: custom[NAME]}
