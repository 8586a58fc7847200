"""Hold every use that capture makes of PyTorch's private names. Checked on PyTorch 2.13.0."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._decomp import decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import with_effects
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.function import _SingleLevelFunction as FunctionBase
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
)
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)
from torch.fx.proxy import _register_stack_trace_anchor as quote_source_of
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes as outside_modes

from ipu_dynamo.ops.private.graphs import tracing_here
from ipu_dynamo.ops.private.replacing import TrueInThisThread, in_this_thread, replaced

__all__ = [
    "DATA_DEPENDENT",
    "BackwardTokenAOTInput",
    "Cutting",
    "ForwardTokenAOTInput",
    "ForwardTokenAOTOutput",
    "FunctionBase",
    "GradAOTOutput",
    "GuardOnDataDependentSymNode",
    "InputMutationAOTOutput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "RestartAnalysis",
    "ShortenTraceback",
    "TangentAOTInput",
    "allow_retain_graph",
    "aot_cache_forced",
    "called_again",
    "compile_count",
    "compile_passes",
    "cut_directions",
    "errors_are_swallowed",
    "export_joint",
    "fake_mode",
    "fake_mode_of",
    "flatten",
    "flatten_with_path",
    "functional_transforms_replaced",
    "graph_being_traced",
    "is_fake",
    "key_text",
    "marked_dynamic",
    "masks_unread",
    "moved",
    "outside_function_modes",
    "outside_modes",
    "outside_recording",
    "outside_tracing",
    "pytree",
    "quote_source_of",
    "recompile_limit",
    "reset_with_dynamo",
    "run_backward",
    "seen_as_compiling",
    "skipped_frames",
    "source_name",
    "static",
    "to_fake",
    "trace_once",
    "unbacked_symbols",
    "with_effects",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
# what torch.nn.utils.rnn calls to pack sequences, and to unpack them
pack_padded_sequence = torch._pack_padded_sequence
pad_packed_sequence = torch._pad_packed_sequence


def shape_of_values(error: BaseException | None) -> str:
    """The operator whose result has a shape that depends on values, "" for any other error."""
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
    with tracing_here(), mode:
        return tracer(*tensors)


def called_again(
    function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Trace `function` by itself, below functorch's transforms, and call its operators again.

    Its own trace is outside of autograd, so that a `detach` in it is one that the user wrote.
    """
    tracer = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)
    with disable_proxy_modes_tracing(), torch.no_grad():
        graph = tracer(*tensors)
    results: Sequence[Tensor] = fx.Interpreter(graph).run(*tensors)
    return results


@contextmanager
def functional_transforms_replaced(
    vectorised: Callable[..., Any], differentiated: Callable[..., Any]
) -> Iterator[None]:
    """Replace what `torch.vmap` and the gradients of `torch.func` call, in this thread.

    Args:
        vectorised: takes the function that it replaces, and its arguments.
        differentiated: takes the name of what it replaces, that, and its arguments.
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


def export_joint(
    module: nn.Module, tensors: Sequence[Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """Functionalise `module`, and differentiate its first output where an input requires grad.

    The backward pass has no autocast: its dtypes follow from those of the forward pass, as where
    `backward()` is called outside autocast. Placeholders and outputs of the result carry
    meta["desc"].
    """
    with ExitStack() as stack:
        stack.enter_context(tracing_here())
        stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(preserve_node_meta())
        if torch.is_grad_enabled():
            stack.enter_context(lstms_in_operators())
        joint = aot_export_joint_with_descriptors(stack, module, tuple(tensors))
        return joint.graph_module


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


def lstms_in_operators() -> AbstractContextManager[None]:
    """Keep oneDNN's LSTM out of what is differentiated: its operator saves tensors that
    AOTAutograd cannot handle, and has a backward that cannot be called on its own."""
    name = "select_one_layer_lstm_function"
    choose = in_this_thread(lambda *_: decompositions.one_layer_lstm, getattr(decompositions, name))
    return replaced(decompositions, name, choose)


Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]


Directions = tuple[fx.GraphModule, fx.GraphModule]
Cutting = Literal["minimum", "none"]


def compile_passes(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    *,
    joint: Callable[[fx.GraphModule, int, Sequence[int]], Directions],
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
) -> Callable[..., Any]:
    """Functionalise and differentiate Dynamo's graph, and hand each flat graph to its compiler.

    The backward graph is compiled at once, so that its errors do not wait for `backward()`.

    Args:
        joint: cuts the joint graph in two; gets how many of its results are forward's, and which
            inputs are the same tensors in every call.
    """

    def partition(
        graph: fx.GraphModule,
        examples: Sequence[Any],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
    ) -> Directions:
        return joint(graph, num_fwd_outputs, static_lifetime_input_indices or ())

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=False,
    )
    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        lstms_in_operators(),
        _values_as_sizes(),
    ):
        return compiler(gm, examples)


def cut_directions(
    joint: fx.GraphModule, results: int, lasting: Sequence[int], cutting: Cutting
) -> Directions:
    """The forward and the backward graph of a joint graph, by functorch.

    Args:
        results: how many of its results are forward's.
        lasting: which inputs are the same tensors in every call.
        cutting: `minimum`: backward repeats cheap operators of forward, so that as few bytes as
            possible are kept; `none`: it reads what forward has computed.
    """
    cut = min_cut_rematerialization_partition if cutting == "minimum" else default_partition
    return cut(joint, (), num_fwd_outputs=results, static_lifetime_input_indices=list(lasting))


@contextmanager
def _values_as_sizes() -> Iterator[None]:
    """Let gradients have operators whose shapes depend on values, as with `fullgraph=True`.

    Those of `x[mask] = value` are rewritten later; for what stays there is an error with a line.
    """
    context = TracingContext.try_get()
    shapes = context.fake_mode.shape_env if context and context.fake_mode else None
    if shapes is None:
        yield
        return
    allowed = replace(
        shapes.settings, allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True
    )
    with replaced(shapes, "settings", allowed):
        yield


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Leave AOTAutograd's tracing, to work with real tensors and to compile them."""
    with unset_fake_temporarily(), tracing(None):
        yield


def allow_retain_graph() -> None:
    """While forward is compiled: say that backward frees no saved tensor before autograd does.

    AOTAutograd refuses `backward(retain_graph=True)` otherwise. PyTorch 2.13.0 also refuses it
    where `torch._functorch.config.donated_buffer` was off when compiling.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def aot_cache_forced() -> bool:
    """Whether AOTAutograd would answer from its own cache, which knows no stages and options."""
    return bool(torch._functorch.config.force_autograd_cache)


def source_name(node: fx.Node) -> str:
    """Where Dynamo found the placeholder `node`, as a Python expression over `L` and `G`."""
    source = getattr(node, "_dynamo_source", None)
    return str(source.name) if source is not None else node.name


def marked_dynamic(value: object) -> list[int]:
    """Dimensions of a tensor that the user marked with `torch._dynamo.mark_dynamic`."""
    return sorted(getattr(value, "_dynamo_dynamic_indices", ()))


def static(value: Any) -> Any:
    """`value` with numbers in place of symbols that were specialised; None for other symbols."""
    if isinstance(value, tuple | list):
        parts = [static(part) for part in value]
        unknown = any(
            new is None and old is not None for new, old in zip(parts, value, strict=True)
        )
        return None if unknown else type(value)(parts)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None if free_unbacked_symbols(value) else _number(value)
    if not isinstance(value, FakeTensor) or not value._has_symbolic_sizes_strides:
        return value
    if free_unbacked_symbols(value):
        return None
    with value.fake_mode:
        return torch.empty_strided(
            [int(size) for size in value.shape],
            [int(stride) for stride in value.stride()],
            dtype=value.dtype,
            device=value.device,
        )


def unbacked_symbols(value: Any) -> set[str]:
    """The symbols in a fake value, or in a tuple of them, that stand for values of tensors."""
    found: set[str] = set()
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            found |= set(map(str, free_unbacked_symbols(leaf)))
    return found


def reset_with_dynamo(backend: Callable[..., Any]) -> None:
    """Have `torch._dynamo.reset()` call `backend.reset`, also after an earlier reset."""
    torch._dynamo.eval_frame.cached_backends.setdefault(id(backend), backend)


@contextmanager
def skipped_frames() -> Iterator[list[str]]:
    """Collect Dynamo's reasons for breaks, and for parts of a model that it gave no backend."""
    reasons = torch._dynamo.utils.counters["unimplemented"]
    before = dict(reasons)
    found: list[str] = []
    yield found
    found += [reason for reason, count in reasons.items() if count > before.get(reason, 0)]


def errors_are_swallowed() -> bool:
    """Whether Dynamo would run the model in plain PyTorch after any error of ours."""
    return bool(torch._dynamo.config.suppress_errors)


def compile_count(gm: fx.GraphModule) -> tuple[int, int]:
    """Which frame `gm` was captured from, and how often that was captured before."""
    identity = gm.meta.get("dynamo_compile_id")
    return (-1, 0) if identity is None else (identity.frame_id, identity.frame_compile_id)


def recompile_limit() -> int:
    """How many graphs Dynamo compiles for one frame before it gives up."""
    return int(torch._dynamo.config.recompile_limit)


def _number(symbol: torch.SymInt | torch.SymFloat | torch.SymBool) -> float:
    if isinstance(symbol, torch.SymInt):
        return int(symbol)
    return float(symbol) if isinstance(symbol, torch.SymFloat) else bool(symbol)


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
