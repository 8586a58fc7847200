"""Trace what loops and branches call as graphs of their own. Checked on PyTorch 2.13.0."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops import utils as higher_order
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan, scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.proxy import _register_stack_trace_anchor as quote_source_of
from torch.utils._python_dispatch import _disable_current_modes

from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

__all__ = [
    "cond_op",
    "is_tracing",
    "map_impl",
    "quote_body",
    "scan",
    "scan_op",
    "trace_body",
    "while_loop_op",
]


def is_tracing() -> bool:
    """Whether a trace of this thread writes a graph."""
    return proxy_tensor.get_proxy_mode() is not None


def example(mode: FakeTensorMode, like: Tensor, *, row: bool = False) -> Tensor:
    """A dense tensor with the type of `like`, or of its rows, which no graph knows."""
    shape = list(like.shape[1:] if row else like.shape)
    with _disable_current_modes(), mode:
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def trace_body(
    function: Callable[..., Any], examples: Sequence[Tensor]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph of `function`, within a trace, and the tensors from outside that it reads.

    These are inputs of the graph, after those that stand for `examples`.
    """
    tracer: Any = proxy_tensor._CURRENT_MAKE_FX_TRACER
    assert tracer is not None, "there is no trace"
    traced = tracer._make_sub_tracer()
    with traced._init_modes_from_parent(tracer):
        traced.fx_tracer.record_stack_traces = True
        traced.fx_tracer._record_forward_stack_traces_only = True
        graph = traced._trace_inner(lambda *tensors: function(*tensors), *examples)
    return graph, _captured(graph)


def quote_body(function: object) -> None:
    """Record lines of a user's function as sources of its operators; of a partial, of its parts."""
    if isinstance(function, partial):
        for part in (function.func, *function.args, *function.keywords.values()):
            quote_body(part)
    elif callable(function):
        quote_source_of(getattr(function, "__func__", function))


def _captured(module: fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a traced graph holds into inputs."""
    graph, inputs, captured = module.graph, dict[int, fx.Node](), list[Tensor]()
    first = next(node for node in graph.nodes if node.op != "placeholder")
    held = [
        (node, value)
        for node in graph.find_nodes(op="get_attr")
        if isinstance(value := getattr(module, str(node.target)), Tensor)
    ]
    for _, value in held:
        if id(value) not in inputs:
            with graph.inserting_before(first):
                inputs[id(value)] = graph.placeholder(f"captured_{len(captured)}")
            inputs[id(value)].meta["val"] = value
            captured.append(value)
    for node, value in held:
        node.replace_all_uses_with(inputs[id(value)])
        graph.erase_node(node)
    return captured


@contextmanager
def operators_replaced(by: dict[object, Callable[..., Any]]) -> Iterator[None]:
    """Call these functions where this thread would call operators that hold graphs.

    Models may hold references to PyTorch's public functions. Those would compile the called
    functions with Dynamo before they call the operator; this step is replaced, too.
    """

    def called(function: Callable[..., Any], args: Sequence[Any], kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))

    name = "_hop_compile_and_call"
    with ExitStack() as stack:
        compiled = in_this_thread(called, getattr(higher_order, name))
        stack.enter_context(replaced(higher_order, name, compiled))
        for operator, function in by.items():
            method = _method(function, type(operator).__call__)
            stack.enter_context(replaced(type(operator), "__call__", method))
        yield


def _method(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    def method(self: object, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return in_this_thread(method, original)
