"""Have AOTAutograd make functional graphs with gradients. Checked on PyTorch 2.13.0."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._decomp import decompositions
from torch._decomp.decompositions_for_rng import PhiloxState
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
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
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.traceback import _get_memory_budget_annotation, preserve_node_meta

from ipu_dynamo.ops.private.graphs import tracing_here
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BackwardTokenAOTInput",
    "Cutting",
    "ForwardTokenAOTInput",
    "ForwardTokenAOTOutput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "allow_retain_graph",
    "aot_cache_forced",
    "budget_of_memory",
    "compile_passes",
    "cut_directions",
    "export_joint",
    "lstms_in_operators",
    "outside_tracing",
    "overlapping_tensors",
    "taking_list",
    "with_effects",
]


def taking_list(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let AOTAutograd call a function with a list, which it may empty."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def overlapping_tensors(tensors: Sequence[Tensor]) -> set[int]:
    """Places of those tensors of one storage that have elements in common with another one."""
    return set(compute_overlapping_tensors(list(tensors), symbolic=False))


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
        stack.enter_context(_one_unread_state())
        if torch.is_grad_enabled():
            stack.enter_context(lstms_in_operators())
        joint = aot_export_joint_with_descriptors(stack, module, tuple(tensors))
        return joint.graph_module


_UNREAD = torch.tensor(())  # as PyTorch's states of random numbers begin


def _one_unread_state() -> AbstractContextManager[None]:
    """Let AOTAutograd's states of random numbers share one tensor until they are set.

    Each of its traces makes twelve of them, through all modes of the traces around it, and no code
    reads them. This took a twelfth of the compile time of a model with loops.
    """

    def reset(state: Any) -> None:
        state.set_state(_UNREAD, _UNREAD)
        state.offset_advanced_at_least_once = False

    return replaced(PhiloxState, "reset", in_this_thread(reset, PhiloxState.reset))


def lstms_in_operators() -> AbstractContextManager[None]:
    """Keep oneDNN's LSTM out of differentiated graphs: its operator saves tensors that
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
            possible are kept; `none`: it reads the results of forward.
    """
    cut = min_cut_rematerialization_partition if cutting == "minimum" else default_partition
    budget = max(torch._functorch.config.activation_memory_budget, _LEAST_BUDGET)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        return cut(joint, (), num_fwd_outputs=results, static_lifetime_input_indices=list(lasting))


_LEAST_BUDGET = 1e-9  # for 0 the partitioner keeps the inputs only, and draws again


def budget_of_memory(graph: fx.Graph) -> bool:
    """Whether the user bounds the memory of kept values, so that any operator may be repeated."""
    if torch._functorch.config.activation_memory_budget < 1:
        return True
    return any(_get_memory_budget_annotation(node) is not None for node in graph.nodes)


@contextmanager
def _values_as_sizes() -> Iterator[None]:
    """Let gradients have operators whose shapes depend on values, as with `fullgraph=True`.

    Those of `x[mask] = value` are rewritten later; for others there is an error with a line.
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
