"""Offer the signatures of a SavedModel of TensorFlow, as those of other saved programs."""

from collections.abc import Iterable
from pathlib import Path

from ipu_dynamo.saved_model.signature import Signature
from ipu_dynamo.saved_model.tf_graphs.graph_module import unsupported
from ipu_dynamo.saved_model.tf_graphs.import_signature import flatten_signature, import_signature
from ipu_dynamo.saved_model.tf_graphs.meta_graphs import TfMetaGraph, read_meta_graphs


class TfPrograms:
    """The programs in a folder that TensorFlow saved.

    Raises:
        ValueError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._graphs = read_meta_graphs(path)

    def tag_sets(self) -> list[list[str]]:
        return sorted(sorted(graph.tags) for graph in self._graphs)

    def find(self, tags: Iterable[str]) -> TfMetaGraph | None:
        """The meta graph of a tag set."""
        wanted = frozenset(tags)
        return next((graph for graph in self._graphs if graph.tags == wanted), None)

    def signature(self, graph: TfMetaGraph, key: str) -> Signature:
        """A signature as a program of PyTorch.

        Raises:
            NotImplementedError: it has operators that are not supported.
        """
        program, entry, defaults = import_signature(self.path, graph, graph.signatures[key])
        return Signature(program, entry, f"{self.path}: signature {key!r}", defaults=defaults)

    def operators(self, graph: TfMetaGraph, key: str) -> list[str]:
        """The operators of a signature by TensorFlow's names; nothing is imported for it."""
        flat = flatten_signature(graph, graph.signatures[key])
        missing = unsupported(flat.nodes)
        names = {node.op for node in flat.nodes}
        return sorted(f"{op} (not supported)" if op in missing else op for op in names)
