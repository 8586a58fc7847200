"""Hold what `aot_compile` needs of PyTorch's private names. Checked on PyTorch 2.13.0."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ipu_dynamo.capture.private.tracing import fake_mode_of

__all__ = [
    "SerializableCallable",
    "aot_compiling",
    "dump_graph",
    "load_graph",
    "own_cache_off",
    "without_view",
]


def aot_compiling() -> bool:
    """Whether `torch.compile(...).aot_compile(...)` calls the backend."""
    config = torch._functorch.config
    return bool(config.force_autograd_cache and config.bundled_autograd_cache)


def dump_graph(graph: fx.GraphModule) -> bytes:
    """A graph as bytes, a pickle."""
    data: bytes = GraphPickler.dumps(graph, Options(ops_filter=None))
    return data


def without_view(value: Tensor) -> Tensor:
    """A tensor like `value`; of a view without its base and its function, which have no bytes."""
    if not value._is_view():
        return value
    with fake_mode_of([value]):
        alike = value.new_empty_strided(value.shape, value.stride())
    return alike.requires_grad_(value.requires_grad)


def load_graph(data: bytes) -> fx.GraphModule:
    """The graph that `dump_graph` wrote."""
    graph = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(graph, fx.GraphModule)
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverloadPacket):  # a copy, not the registered one
            namespace, name = node.target._qualified_op_name.split("::")
            node.target = getattr(getattr(torch.ops, namespace), name)
    graph.recompile()
    return graph


@contextmanager
def own_cache_off() -> Iterator[None]:
    """Keep AOTAutograd from its own cache, which `aot_compile` switches on."""
    off = {"force_autograd_cache": False, "bundled_autograd_cache": False}
    with torch._functorch.config.patch(off):
        yield
