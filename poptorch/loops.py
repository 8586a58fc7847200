"""Offer PopTorch's loop and branch, which run on the device."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import ipu_dynamo
from poptorch.errors import createPoptorchError, require, wrapped
from poptorch.tracing import current_trace

Body = Callable[..., Tensor | list[Tensor] | tuple[Tensor, ...]]


def for_loop(count: int, body: Body, inputs: list[Tensor]) -> list[Tensor]:
    """Call `body` `count` times, each time with the results of the call before.

    It is traced once. It gets its inputs by value, and may read any other tensor. Loops can be
    nested. Without an executor it is a Python loop.

    Args:
        count: how often; a Python number.
        body: takes as many tensors as there are inputs; returns a tensor, a list or a tuple of as
            many of the same shapes and dtypes.
        inputs: the tensors for the first iteration.

    Returns:
        The results of the last iteration.

    Raises:
        ValueError: `inputs` is no list of tensors.
        poptorch.Error: the model is compiled for training, or the body returns other tensors.
    """
    _check_inputs("for_loop", inputs)
    require(
        isinstance(count, int) and not isinstance(count, bool) and count >= 0,
        f"count must be a number of iterations, got {count!r}",
    )
    _refuse_training("for_loop")
    with wrapped():
        return ipu_dynamo.for_loop(count, body, inputs)


def cond(
    condition: Tensor,
    then_body: Body,
    then_inps: list[Tensor],
    else_body: Body,
    else_inps: list[Tensor],
) -> list[Tensor]:
    """Call one of two functions, by the value of `condition`.

    Both are traced; the program runs one. They may read any tensor, and change none outside. They
    can be nested. Without an executor it is Python's `if`.

    Args:
        condition: one bool.
        then_body: takes the tensors of `then_inps`; called if the condition is true.
        then_inps: a list of tensors.
        else_body: takes the tensors of `else_inps`; returns as many tensors as `then_body`, of the
            same shapes and dtypes.
        else_inps: a list of tensors.

    Raises:
        ValueError: `then_inps` or `else_inps` is no list, or has something else than tensors.
        poptorch.Error: the model is compiled for training, or the functions do not fit.
    """
    _check_inputs("cond", then_inps)
    _check_inputs("cond", else_inps)
    _refuse_training("cond")
    return ipu_dynamo.cond(condition, then_body, then_inps, else_body, else_inps)


def _check_inputs(name: str, inputs: Any) -> None:
    if not isinstance(inputs, list):
        raise ValueError(
            f"poptorch.{name} takes a list of tensors, got {inputs!r} (Object is not list)"
        )
    for index, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"poptorch.{name} takes a list of tensors, got {value!r} "
                f"(Object contained in list at index {index} is not torch.tensor)"
            )


def _refuse_training(name: str) -> None:
    trace = current_trace()
    if trace is not None and trace.training:
        raise createPoptorchError(
            f"poptorch.{name}() is only supported in inference.", id="control-flow"
        )
