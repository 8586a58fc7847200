"""Read `saved_model.pb`: meta graphs by tags, and their signatures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipu_dynamo.saved_model.tf_graphs.messages import parse_message

FILE, TEXT_FILE = "saved_model.pb", "saved_model.pbtxt"
_INIT = "__saved_model_init_op"
_LARGEST = 1 << 31


@dataclass(frozen=True, slots=True)
class Border:
    """An input or output of a signature.

    Attributes:
        tensor: its name in the graph, `node:0`.
        dtype: TensorFlow's number.
        shape: None for a size that calls choose; None as a whole where nothing is known.
    """

    tensor: str
    dtype: int
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True, slots=True)
class TfSignature:
    """A signature: its inputs and outputs by key."""

    inputs: dict[str, Border]
    outputs: dict[str, Border]
    method_name: str


@dataclass(frozen=True, slots=True)
class TfMetaGraph:
    """A graph with its functions, as messages, and its signatures."""

    tags: frozenset[str]
    graph: Any
    signatures: dict[str, TfSignature]


def read_meta_graphs(folder: Path) -> list[TfMetaGraph]:
    """The meta graphs of a SavedModel.

    Raises:
        ValueError: the file is damaged, or two meta graphs have the same tags.
        NotImplementedError: it is in text form.
    """
    path = folder / FILE
    if not path.exists():
        raise NotImplementedError(f"{folder / TEXT_FILE}: SavedModels in text form are not read")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{path}: more than {_LARGEST} bytes")
    message = parse_message("SavedModel", path.read_bytes(), str(path))
    if message.schema_version != 1:
        raise ValueError(f"{path}: version {message.schema_version} of SavedModels, not 1")
    graphs = [_meta_graph(graph) for graph in message.meta_graphs]
    for index, graph in enumerate(graphs):
        if any(graph.tags == other.tags for other in graphs[:index]):
            raise ValueError(f"{path}: two meta graphs have the tags {sorted(graph.tags)}")
    return graphs


def shape_of(message: Any) -> tuple[int | None, ...] | None:
    """The sizes of a shape; -1 is one that is not known."""
    if message.unknown_rank:
        return None
    return tuple(None if dim.size < 0 else dim.size for dim in message.dim)


def _meta_graph(message: Any) -> TfMetaGraph:
    signatures = {
        entry.key: TfSignature(
            _borders(entry.value.inputs),
            _borders(entry.value.outputs),
            entry.value.method_name,
        )
        for entry in message.signatures
        if entry.key != _INIT
    }
    return TfMetaGraph(frozenset(message.meta_info.tags), message.graph, signatures)


def _borders(entries: Any) -> dict[str, Border]:
    return {
        entry.key: Border(entry.value.name, entry.value.dtype, shape_of(entry.value.shape))
        for entry in sorted(entries, key=lambda entry: entry.key)
    }
