"""Keep what tracing before autograd would drop without a word: custom autograd functions, hooks.

A trace records operators before autograd, so it would inline the forward of a
`torch.autograd.Function` and lose its backward. Each `apply` becomes one operator,
`ipu::autograd_function`, which calls the real `apply` when the graph is differentiated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from ipu_dynamo import noted_warnings
from ipu_dynamo.capture.custom.host_functions import on_host
from ipu_dynamo.capture.custom.inner_gradients import record_gradients, record_hook
from ipu_dynamo.capture.custom.nested_call import NestedCall
from ipu_dynamo.capture.private.function_apply import apply_replaced
from ipu_dynamo.capture.private.tracing import flatten, is_fake, run_backward
from ipu_dynamo.errors import CompileError, called_from
from ipu_dynamo.ops.marks.markers import CustomCall, register_function
from ipu_dynamo.ops.private.hooks import has_gradient_hooks
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced


@contextmanager
def custom_functions_kept() -> Iterator[list[CustomCall]]:
    """While tracing, record each `Function.apply` as one operator; in this thread only.

    Yields the list of the functions that these operators call. The graph works only as long as the
    caller keeps this list.

    Tensor hooks and gradients that the model takes itself are recorded, too. The replaced functions
    are below the public ones, since models may have a reference to those: `steep = Steep.apply`.
    """
    inside = False
    kept: list[CustomCall] = []

    def recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return _checkpointed(*args)

        def apply(*args: Any, **kwargs: Any) -> Any:
            return cls.apply(*args, **kwargs)  # the one of the time of the call

        nested = NestedCall(apply, args, kwargs)

        def call(*tensors: Tensor) -> Sequence[Tensor]:
            nonlocal inside
            before, inside = inside, True
            try:
                return nested(tensors)
            finally:
                inside = before

        call.__qualname__ = f"{cls.__qualname__}.apply"  # as texts of graphs call it
        kept.append(call)
        results = torch.ops.ipu.autograd_function(nested.tensors, register_function(call))
        return nested.rebuilt(results)

    def hooked(self: Tensor, hook: Any) -> Any:
        if inside or on_host() or not is_fake(self):
            return register_hook(self, hook)
        return record_hook(self, hook)

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        if inside or on_host():
            return run_backward(*args, **kwargs)
        return record_gradients(*args, **kwargs)

    register_hook: Callable[[Tensor, Any], Any] = torch.Tensor.register_hook
    hook = in_this_thread(hooked, register_hook)
    gradient = in_this_thread(differentiated, run_backward)
    with (
        apply_replaced(recorded, unless=lambda: inside or on_host()),
        replaced(torch.Tensor, "register_hook", hook),
        replaced(torch.autograd, run_backward.__name__, gradient),
    ):
        yield kept


def _checkpointed(run_function: Callable[..., Any], _preserves: bool, *given: Any) -> Any:
    """The results of `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` in a trace.

    Where no argument needs a gradient, plain PyTorch trains nothing within such a checkpoint. A
    program does, as PopTorch and `torch.compile` do; a warning says so, with the line.
    """
    results = run_function(*given)
    if _needs_gradient(flatten(results)[0]) and not _needs_gradient(given):
        noted_warnings.warn(
            f"no argument of this checkpoint needs a gradient, so that plain PyTorch would train "
            f"nothing within it ({called_from()}); the program trains it, as with "
            f"use_reentrant=False, which says the same to both",
        )
    return results


def _needs_gradient(values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def refuse_hooks(model: nn.Module) -> None:
    """Raise for backward hooks on modules and gradient hooks on parameters: a graph has neither."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CompileError(
                f"the backward hook of module {name or type(module).__name__} would not run in "
                f"the compiled program",
                hint="remove the hook, or write it as a torch.autograd.Function",
            )
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise CompileError(
                f"the gradient hook of parameter {name} would not run in the compiled program",
                hint="remove the hook; clip or scale gradients through the optimiser's options",
            )
