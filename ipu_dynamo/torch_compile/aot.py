"""Make the callable that `torch.compile(..., backend="ipu").aot_compile(...)` saves.

The file holds Dynamo's graph and the options. The first call after loading makes the programs from
them, and takes the machine code of their stages from this package's cache.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ipu_dynamo.capture.dynamo import note_modules
from ipu_dynamo.capture.private.dynamo import reset_with_dynamo, set_source, source_name
from ipu_dynamo.capture.private.saved_aot import (
    SerializableCallable,
    dump_graph,
    load_graph,
    own_cache_off,
    without_view,
)
from ipu_dynamo.ops.private.graphs import pytree
from ipu_dynamo.ops.private.node_meta import CUSTOM, EXAMPLE_VALUE
from ipu_dynamo.torch_compile.compile_graph import compile_readably

_KEPT = ("stack_trace", CUSTOM, EXAMPLE_VALUE)  # keys of node.meta that are saved


@dataclass(frozen=True)
class _Source:
    """Where Dynamo found an input; stands for PyTorch's own class, which cannot be saved."""

    name: str


class SavableRegion(SerializableCallable):
    """A compiled graph that another process can load.

    Args:
        data: graph, names of inputs, and options, as `_saved` writes them.
        run: calls the compiled programs; None: they are made at the first call.
    """

    def __init__(self, data: bytes, run: Callable[..., Any] | None = None) -> None:
        self._data, self._run = data, run

    @classmethod
    def serialize_compile_artifacts(cls, fn: "SavableRegion") -> bytes:
        return fn._data

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> "SavableRegion":
        return cls(data)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            self._run = self._compile(args)
        return self._run(*args, **kwargs)

    def _compile(self, args: Sequence[Any]) -> Callable[..., Any]:
        graph, sources, options = pickle.loads(self._data)  # PyTorch loads its file so, too
        gm = load_graph(graph)
        for node, source in zip(gm.graph.find_nodes(op="placeholder"), sources, strict=True):
            set_source(node, _Source(source))
        reset_with_dynamo(compile_readably)
        return compile_readably(gm, args, options)


def savable(gm: fx.GraphModule, examples: Sequence[Any], options: Any) -> SavableRegion:
    """Compile a graph, and keep the data to compile it again in another process.

    Args:
        gm: the compiler may change it.
    """
    data = _saved(gm, options)
    with own_cache_off():
        return SavableRegion(data, compile_readably(gm, examples, options))


def _saved(gm: fx.GraphModule, options: Any) -> bytes:
    note_modules(gm)  # whose paths are not saved
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.meta = {
            key: pytree.tree_map_only(Tensor, without_view, node.meta[key])
            for key in _KEPT
            if key in node.meta
        }
    sources = [source_name(node) for node in gm.graph.find_nodes(op="placeholder")]
    return pickle.dumps((dump_graph(fx.GraphModule(gm, graph)), sources, options))
