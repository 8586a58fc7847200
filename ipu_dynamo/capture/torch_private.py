"""Hold every use that capture makes of PyTorch's private names. Checked on PyTorch 2.13.0."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

__all__ = [
    "DATA_DEPENDENT",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "export_joint",
    "fake_mode",
    "fake_mode_of",
    "flatten",
    "flatten_with_path",
    "is_fake",
    "key_text",
    "pytree",
    "seen_as_compiling",
    "to_fake",
    "trace_once",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

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
    with mode:
        return tracer(*tensors)


def export_joint(
    module: nn.Module, tensors: Sequence[Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """Functionalise `module`, and differentiate its first output where an input requires grad.

    Placeholders and outputs of the result carry meta["desc"].
    """
    with ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(preserve_node_meta())
        joint = aot_export_joint_with_descriptors(stack, module, tuple(tensors))
        return joint.graph_module


@contextmanager
def seen_as_compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` true: libraries then avoid data-dependent branches."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
