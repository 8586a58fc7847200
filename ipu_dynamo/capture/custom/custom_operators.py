"""Compute operators that a program names by PopTorch's rules with functions of PyTorch's operators.

A registry maps domain, name and version to a function, which is traced into the program like the
model's own code.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.capture.custom.replicated_operators import is_replicated, replicated_operator
from ipu_dynamo.errors import CompileError, called_from
from ipu_dynamo.ops.library.shipped import SHIPPED
from ipu_dynamo.ops.precision.narrowing import NARROW

Gradient = Callable[..., Sequence[Tensor | None]]


@dataclass(frozen=True, slots=True)
class CustomOperator:
    """The functions that compute an operator and its gradient.

    Args:
        function: takes the inputs, and the attributes by name; returns a tensor or several.
        gradient: takes the gradients of the results, the inputs and the results, each as a tuple,
            and the attributes by name; returns a gradient, or None, for each input. None: autograd
            differentiates `function`.
    """

    function: Callable[..., Tensor | Sequence[Tensor]]
    gradient: Gradient | None = None


_known = {key: CustomOperator(function) for key, function in SHIPPED.items()}


def register_custom_operator(
    function: Callable[..., Tensor | Sequence[Tensor]],
    *,
    name: str,
    domain: str,
    version: int = 1,
    gradient: Gradient | None = None,
) -> None:
    """Let a function of PyTorch's operators compute a custom operator, from the next trace on.

    It replaces an operator that was registered under that name before.

    Args:
        function: takes the inputs, and the operator's attributes by name; returns a tensor or a
            sequence of them. It is traced, so that it cannot look at values.
        name: of the operator, as models call it.
        domain: of the operator, as models call it.
        version: of the operator, as models call it.
        gradient: `gradient(gradients, inputs, results, **attributes)`, with three tuples, returns a
            gradient, or None, for each input. None: autograd differentiates `function`.
    """
    _known[domain, name, version] = CustomOperator(function, gradient)


def is_registered(name: str, domain: str, version: int) -> bool:
    """Whether a custom operator has a function."""
    return (domain, name, version) in _known


def custom_operator(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    version: int,
    *,
    example_outputs: Sequence[Tensor] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """The results of a custom operator, by the function that is registered for it.

    Args:
        inputs: tensors, which the function takes.
        name: under which the function is registered.
        domain: under which the function is registered.
        version: under which the function is registered.
        example_outputs: tensors with the shapes and types of the results; None: any are right.
        attributes: floats, integers, strings or lists of them by name, which the function takes.

    Raises:
        CompileError: nothing is registered under that name, or it returns other shapes or types
            than the examples have.
    """
    known = _known.get((domain, name, version))
    called = f"custom operator {domain}.{name}, version {version}"
    named = dict(attributes or {})
    if known is not None:
        results = _computed(known, tuple(inputs), named)
    elif is_replicated(name, domain, version):
        results = replicated_operator(inputs, name, example_outputs, named)
    else:
        raise CompileError(
            f"{called}, has no implementation",
            where=called_from(),
            hint=f"ipu_dynamo.register_custom_operator(function, name={name!r}, "
            f"domain={domain!r}, version={version}), with a function of PyTorch's operators that "
            "takes the inputs and the attributes",
            id="operator",
        )
    if example_outputs is not None:
        _check(called, results, example_outputs)
    return results


def _computed(
    known: CustomOperator, inputs: tuple[Tensor, ...], attributes: dict[str, Any]
) -> list[Tensor]:
    if known.gradient is None:
        return _several(known.function(*inputs, **attributes))
    return list(_WithGradient.apply(known, attributes, *inputs))  # type: ignore[no-untyped-call]


class _WithGradient(torch.autograd.Function):
    """A custom operator with a gradient function of its own."""

    @staticmethod
    def forward(
        ctx: Any, known: CustomOperator, attributes: dict[str, Any], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        results = tuple(_several(known.function(*inputs, **attributes)))
        ctx.known, ctx.attributes, ctx.count = known, attributes, len(inputs)
        ctx.save_for_backward(*inputs, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        inputs, results = saved[: ctx.count], saved[ctx.count :]
        of_inputs = ctx.known.gradient(gradients, inputs, results, **ctx.attributes)
        return (None, None, *of_inputs)


def _several(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _check(called: str, results: Sequence[Tensor], examples: Sequence[Tensor]) -> None:
    """Raise unless the results have the examples' shapes and types (64-bit ones as 32-bit)."""
    if len(results) != len(examples):
        raise CompileError(
            f"{called}, has {len(results)} results, but example_outputs {len(examples)} tensors",
            where=called_from(),
            hint="give an example for each result",
            id="operator",
        )
    for index, (result, example) in enumerate(zip(results, examples, strict=True)):
        if _kind(result) != _kind(example):
            raise CompileError(
                f"{called}: result {index} is {_text(result)}, and example_outputs says "
                f"{_text(example)}",
                where=called_from(),
                hint="mend the example, or the function that is registered",
                id="operator",
            )


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return NARROW.get(tensor.dtype, tensor.dtype), tensor.shape


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
