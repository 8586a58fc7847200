"""Reach PyTorch's private names of graphs and operators. Checked on PyTorch 2.13.0."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import _ops, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import _symbolic_trace
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ipu_dynamo.ops.private.deferred_signals import signals_wait
from ipu_dynamo.ops.private.replacing import TrueInThisThread, in_this_thread, replaced

__all__ = [
    "MODE_SWITCHES",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "ShapeEnv",
    "code_on_demand",
    "erased_names",
    "implementation",
    "is_erased",
    "is_registered",
    "module_of",
    "pytorch_compile_lock",
    "pytree",
    "rename_node",
    "reserve_names",
    "schema_of",
    "tracing_here",
    "with_device",
]

# functions other than operators that graphs before autograd call, by name
MODE_SWITCHES: dict[str, Callable[..., Any]] = {
    "set_grad_enabled": torch._C._set_grad_enabled,
    "enter_autocast": torch.amp.autocast_mode._enter_autocast,
    "exit_autocast": torch.amp.autocast_mode._exit_autocast,
}


def module_of(graph: fx.Graph, attributes: torch.nn.Module | None = None) -> fx.GraphModule:
    """A module that runs `graph`, with those of the `attributes` that it reads.

    Its Python code is written only when it is read: most stages run without it, and writing it
    takes as long as a pass.
    """
    return _LazyGraphModule(attributes or torch.nn.Module(), graph)


def code_on_demand() -> AbstractContextManager[None]:
    """Let tracing make modules like `module_of`."""
    return _use_lazy_graph_module(True)


def erased_names(graph: fx.Graph) -> tuple[tuple[str, ...], dict[str, int]]:
    """List the names of erased nodes, which the graph gives to no new node, and its counters.

    Returns:
        The names, and the last number of each base name. Counters that `reserve_names` restores
        from the names alone are left out.
    """
    names = graph._graph_namespace
    taken = set(names._used_names).difference(node.name for node in graph.nodes)
    erased = tuple(sorted(taken, key=_numbered))
    alike = fx.Graph()
    for node in graph.nodes:
        alike._graph_namespace.create_name(node.name, None)
    reserve_names(alike, erased, {})
    usual = alike._graph_namespace._base_count
    counts = {k: n for k, n in names._base_count.items() if usual.get(k) != n}
    counts |= dict.fromkeys(usual.keys() - names._base_count.keys(), 0)
    return erased, dict(sorted(counts.items()))


def reserve_names(graph: fx.Graph, names: Sequence[str], counts: Mapping[str, int]) -> None:
    """Let a graph give none of these names to a new node, and count on from there."""
    for name in names:
        graph._graph_namespace.create_name(name, None)
    graph._graph_namespace._base_count.update(counts)


def rename_node(node: fx.Node, name: str) -> None:
    """Give a node this name, with a number if another node of its graph has it."""
    node._rename(name)


def is_erased(node: fx.Node) -> bool:
    """Whether a node was erased from its graph."""
    return node._erased


def implementation(operator: OpOverload) -> Callable[..., Any]:
    """The function of C++ that an operator calls, without Python around it."""
    called: Callable[..., Any] = operator._op
    return called


def schema_of(operator: OpOverload) -> torch.FunctionSchema:
    """The arguments and results of an operator, and the arguments that it writes."""
    return operator._schema


def _numbered(name: str) -> tuple[str, int, str]:
    base, _, number = name.rpartition("_")
    return (base, int(number), name) if base and number.isdecimal() else (name, 0, name)


def with_device(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor like `meta`, on `device`; six times as fast as to make it under the mode."""
    return FakeTensor(mode, meta, device)


def pytorch_compile_lock() -> threading.RLock:
    """The lock that PyTorch holds while `torch.compile` captures and compiles, in any thread."""
    from torch._dynamo.convert_frame import compile_lock  # Dynamo: a second to import

    return compile_lock


_no_modes: Callable[[], Any] = _ops._ModeStackStateForPreDispatch


@contextmanager
def tracing_here() -> Iterator[None]:
    """Let `make_fx` trace in this thread, without a trace of that in others; signals wait.

    The modes that record before autograd are the whole process's in PyTorch. A thread that leaves
    all modes for a while, as for a copy of weights, would leave those of the thread that traces.

    PyTorch notes for the whole process that a trace runs, and compiled functions refuse calls in
    that time. Here PyTorch's code runs with globals of its own, so the note is not seen elsewhere.
    With them it also leaves `nn.Module` unpatched: the patches have no effect in such a trace, and
    take a millisecond for a thousand classes of modules.
    """
    shared = _symbolic_trace.Tracer.trace
    plain = unwrap(shared)  # Dynamo wraps it
    assert isinstance(plain, FunctionType)

    def with_names(**names: Any) -> FunctionType:
        return FunctionType(
            plain.__code__, vars(_symbolic_trace) | names, argdefs=plain.__defaults__
        )

    usual, of_functions = with_names(), with_names(_new_patcher=_patcher_of_functions)

    def own(tracer: fx.Tracer, *args: Any, **kwargs: Any) -> Any:
        code = of_functions if type(tracer) is PythonKeyTracer else usual
        return code(tracer, *args, **kwargs)

    trace = in_this_thread(torch.compiler.disable(own), shared)
    modes: Callable[[], Any] = _ops.mode_stack_state_for_pre_dispatch
    state = modes()
    if state.count() == 0 and state is _ops._mode_stack_state_for_pre_dispatch:
        state = _no_modes()  # of this thread, and of traces within this one
    with (
        pytorch_compile_lock(),
        signals_wait(),
        replaced(_symbolic_trace, "_is_fx_tracing_flag", TrueInThisThread()),
        replaced(PythonKeyTracer, "trace", trace),
        replaced(_ops, "mode_stack_state_for_pre_dispatch", in_this_thread(lambda: state, modes)),
    ):
        yield


class _OfFunctions(_symbolic_trace._Patcher):
    """Replaces functions for a trace, and not the methods of `nn.Module`.

    `PythonKeyTracer` itself records no modules: it calls them, and gives their attributes.
    """

    def patch_method(self, cls: type, *arguments: Any, **named: Any) -> None:
        if cls is not torch.nn.Module:  # another class, which a user has registered
            super().patch_method(cls, *arguments, **named)


@contextmanager
def _patcher_of_functions() -> Iterator[_OfFunctions]:
    patcher = _OfFunctions()
    try:
        yield patcher
    finally:
        patcher.revert_all_patches()


def is_registered(operator: str, overload: str) -> bool:
    """Whether PyTorch's dispatcher knows `namespace::operator` with that overload."""
    try:
        torch._C._dispatch_find_schema_or_throw(operator, overload)
    except RuntimeError:
        return False
    return True
