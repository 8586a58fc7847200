"""Trace Python on fake tensors, by private names of PyTorch. Checked on PyTorch 2.13.0."""

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.function import _SingleLevelFunction as FunctionBase
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
)
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
)
from torch.fx.proxy import _register_stack_trace_anchor as quote_source_of
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes as outside_modes

from ipu_dynamo.capture.private.recording import shortened_recording
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.marks.detached import DetachesMarked, detached_op
from ipu_dynamo.ops.private.graphs import tracing_here
from ipu_dynamo.ops.private.replacing import TrueInThisThread, in_this_thread, replaced

__all__ = [
    "DATA_DEPENDENT",
    "FunctionBase",
    "GuardOnDataDependentSymNode",
    "autocast_again",
    "autocasts",
    "called_again",
    "constant_value",
    "fake_mode",
    "fake_mode_of",
    "flatten",
    "flatten_with_path",
    "functional_transforms_replaced",
    "graph_being_traced",
    "is_fake",
    "is_real",
    "is_traced",
    "key_text",
    "masks_unread",
    "moved",
    "node_of",
    "outside_function_modes",
    "outside_modes",
    "outside_recording",
    "pytree",
    "quote_source_of",
    "run_backward",
    "scripts_recorded",
    "seen_as_compiling",
    "seen_on",
    "to_fake",
    "trace_once",
    "tracer_here",
    "unrecorded",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
# what torch.nn.utils.rnn calls to pack sequences, and to unpack them
pack_padded_sequence = torch._pack_padded_sequence
pad_packed_sequence = torch._pad_packed_sequence


def shape_of_values(error: BaseException | None) -> str:
    """The operator in an error about a shape that depends on values, "" for any other error."""
    if not isinstance(error, DynamicOutputShapeException):
        return ""
    return str(error.func).removesuffix(".default")


outside_function_modes = torch._C.DisableTorchFunction
outside_recording = disable_proxy_modes_tracing  # operators run, and no graph gets them
key_text = pytree.keystr
flatten = pytree.tree_flatten
flatten_with_path = pytree.tree_flatten_with_path


def fake_mode() -> FakeTensorMode:
    """A mode for static shapes in which the user's own tensors may appear as constants.

    It has no shape environment: with one, all sizes would become symbolic.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """The mode that `values` were traced in; a new one when none is a fake tensor."""
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    return modes[0] if modes else fake_mode()


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has values of its own, and wraps none that is traced."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (is_fake(tensor) or wrapped or torch._is_functional_tensor(tensor))


def is_traced(tensor: Tensor) -> bool:
    """Whether the graph of a trace of this thread has a value for `tensor`."""
    mode = get_proxy_mode()
    return mode is not None and get_proxy_slot(tensor, mode.tracer, None) is not None


def node_of(tensor: Tensor, tracer: Any) -> fx.Node | None:
    """The current node of a traced tensor in its graph."""
    proxy = get_proxy_slot(tensor, tracer, None)
    return None if proxy is None else proxy.proxy.node


def tracer_here() -> Any:
    """The tracer that records in this thread."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def to_fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    return mode.from_tensor(tensor, static_shapes=True)


def moved(
    mode: FakeTensorMode, fakes: Sequence[Tensor], device: torch.device | None
) -> list[Tensor]:
    """Fake leaves with the layouts of `fakes`, on `device`; None: where they are."""
    with mode:
        return [
            fake
            if device in (None, fake.device)
            else torch.empty_strided(
                fake.shape, fake.stride(), dtype=fake.dtype, device=device
            ).requires_grad_(fake.requires_grad)
            for fake in fakes
        ]


@contextmanager
def seen_on(device: torch.device, *, but_by: Collection[str]) -> Iterator[None]:
    """Let code that this thread traces read `device` as the device of fake tensors.

    Args:
        device: of another name than the one that computes.
        but_by: packages that read the real one: they choose kernels by it.
    """
    own: Any = FakeTensor.device

    def seen(tensor: FakeTensor) -> torch.device:
        frame = sys._getframe(2)  # behind `in_this_thread`
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        return own.fget(tensor) if package in but_by else device

    with replaced(FakeTensor, "device", property(in_this_thread(seen, own.fget))):
        yield


@contextmanager
def unrecorded() -> Iterator[None]:
    """Run without gradients and outside of all modes: a trace that is going on notices nothing.

    A trace would record even that gradients are switched off.
    """
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(outside_modes())
        stack.enter_context(torch.no_grad())
        yield


def trace_once(
    function: Callable[..., Any], tensors: Sequence[Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """Run `function` once on fake `tensors`; record high-level operators before autograd."""
    tracer = make_fx(
        function,
        pre_dispatch=True,
        tracing_mode="real",  # the inputs are fake already, in a mode of our choice
        _allow_non_fake_inputs=True,
        record_stack_traces=True,
    )
    with tracing_here(), shortened_recording(), mode:
        return tracer(*tensors)


def called_again(
    function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Trace `function` by itself, below functorch's transforms, and call its operators again.

    Its own trace is outside of autograd, so that a `detach` in it is one that the user wrote.
    """
    tracer = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)
    with disable_proxy_modes_tracing(), torch.no_grad(), DetachesMarked():
        graph = tracer(*tensors)
    for node in graph.graph.find_nodes(op="call_function", target=detached_op):
        node.target = aten.detach.default
    results: Sequence[Tensor] = fx.Interpreter(graph).run(*tensors)
    return results


@contextmanager
def functional_transforms_replaced(
    vectorised: Callable[..., Any], differentiated: Callable[..., Any]
) -> Iterator[None]:
    """Replace the functions that `torch.vmap` and gradients of `torch.func` call, in this thread.

    Args:
        vectorised: takes the function that it replaces, and its arguments.
        differentiated: takes the name of the function that it replaces, this function, and its
            arguments.
    """
    apis, transforms = torch._functorch.apis, torch._functorch.eager_transforms
    original = vars(apis)["vmap_impl"]
    with ExitStack() as stack:
        replacement = in_this_thread(partial(vectorised, original), original)
        stack.enter_context(replaced(apis, "vmap_impl", replacement))
        for name in ("grad_impl", "grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums"):
            before = getattr(transforms, name)
            recorded = in_this_thread(partial(differentiated, name, before), before)
            stack.enter_context(replaced(transforms, name, recorded))
        yield


def graph_being_traced() -> fx.Graph | None:
    """The graph that a trace of this thread writes; None outside of one."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def constant_value(tensor: Tensor) -> Tensor | None:
    """The value of a tensor that a trace of this thread makes of constants alone.

    None: it depends on an input or on random numbers, or there is no trace.
    """
    mode = get_proxy_mode()
    proxy = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if mode is None or proxy is None:
        return None
    wanted: dict[fx.Node, None] = {}
    waiting = [proxy.proxy.node]
    while waiting:
        node = waiting.pop()
        if node in wanted:
            continue
        tags = getattr(node.target, "tags", ())
        if node.op not in ("call_function", "get_attr") or _RANDOM in tags:
            return None
        wanted[node] = None
        waiting += node.all_input_nodes
    values: dict[fx.Node, Any] = {}
    with outside_modes(), outside_function_modes(), torch.no_grad():
        for node in mode.tracer.graph.nodes:
            if node not in wanted:
                continue
            if node.op == "get_attr":
                root: Any = getattr(mode.tracer, "root", None)
                values[node] = getattr(root, str(node.target))
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    value: Tensor = values[proxy.proxy.node]
    return value


_RANDOM = torch.Tag.nondeterministic_seeded


def autocasts(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """The nodes of a graph but those that switch autocast, each with those that it is within."""
    within: tuple[fx.Node, ...] = ()
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            within = (*within, node)
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            within = tuple(entered for entered in within if entered is not node.args[0])
        else:
            yield node, within


@contextmanager
def autocast_again(entered: Sequence[fx.Node]) -> Iterator[None]:
    """Set autocast as the nodes have set it."""
    switches = [node.target(*node.args) for node in entered]  # type: ignore[operator]
    try:
        yield
    finally:
        for switch in reversed(switches):
            torch.amp.autocast_mode._exit_autocast(switch)


def seen_as_compiling() -> AbstractContextManager[None]:
    """Make `torch.compiler.is_compiling()` true: libraries then avoid data-dependent branches.

    In other threads it stays false: PyTorch's optimisers compute otherwise when it is true.
    """
    return replaced(torch.compiler, "_is_compiling_flag", TrueInThisThread())


def masks_unread() -> AbstractContextManager[None]:
    """Keep `nn.Transformer` and its parts from reading whether a mask is a causal one.

    The answer is a hint: without it they apply the mask that they were given.
    """

    def detect(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    module, name = torch.nn.modules.transformer, "_detect_is_causal_mask"
    return replaced(module, name, in_this_thread(detect, getattr(module, name)))


@contextmanager
def scripts_recorded() -> Iterator[None]:
    """Let scripted and traced functions of TorchScript call their operators one by one.

    TorchScript's optimised code has an autograd of its own, which no trace sees. Code that was
    optimised in earlier calls is dropped; TorchScript optimises it again.
    """

    def plain(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(script: Any, *args: Any, **kwargs: Any) -> Any:
            script._debug_flush_compilation_cache()
            return call(script, *args, **kwargs)

        return in_this_thread(run, call)

    with ExitStack() as stack:
        stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        for kind in (torch.jit.ScriptFunction, torch._C.ScriptMethod):
            call = plain(kind.__call__)
            stack.enter_context(replaced(kind, "__call__", call))
        yield


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep fake tensors from logging a traceback for an operator that the error names anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    is_here = TrueInThisThread()

    def passes(record: logging.LogRecord) -> bool:
        return not is_here

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that a step was made, as `optimizer.step()` would."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
