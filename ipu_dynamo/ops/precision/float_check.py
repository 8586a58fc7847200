"""Define the operator that stops a program at a floating-point exception.

Source: PopTorch user guide, "poptorch.options._PrecisionOptions.enableFloatingPointExceptions";
IEEE 754, section 7, for the definition of exceptions.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

Kind = Literal["elementwise", "division", "remainder", "reciprocal", "comparison", "whole"]

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define(
    "check_floating_point(Tensor result, Tensor[] operands, float[] numbers, str kind, "
    "str operator) -> ()"
)


def _check(
    result: Tensor, operands: Sequence[Tensor], numbers: Sequence[float], kind: Kind, operator: str
) -> None:
    """Raise if `result` has nan or infinities that do not come from the operands.

    Args:
        operands: the floating-point tensors that it read.
        numbers: the Python numbers that it read.
        kind: `whole` holds all elements against all operands, `comparison` only asks for nan, the
            others hold every element against its own operands.

    Raises:
        FloatingPointError: nan from no nan (invalid operation), infinity from finite operands
            (overflow, or division by zero), division by zero or infinity, or comparison with nan.
    """
    problem = _problem(result, [*operands, *map(torch.tensor, numbers)], kind)
    if problem:
        raise FloatingPointError(f"{operator}: {problem}")


def _problem(result: Tensor, values: Sequence[Tensor], kind: Kind) -> str:
    if kind == "comparison":
        return "comparison with nan" if any(value.isnan().any() for value in values) else ""
    if kind in ("division", "remainder"):
        valid = ~values[0].isnan()
        if ((values[1] == 0) & valid).any():
            return "division by zero"
        if kind == "division" and (values[1].isinf() & valid).any():
            return "division by infinity"
    if kind == "reciprocal" and values[0].isinf().any():
        return "division by infinity"
    if result.isfinite().all():
        return ""
    nan = infinite = torch.tensor(False)
    for value in values:
        was_nan, was_infinite = value.isnan(), value.isinf()
        nan = nan | (was_nan.any() if kind == "whole" else was_nan)
        infinite = infinite | (was_infinite.any() if kind == "whole" else was_infinite)
    if (result.isnan() & ~nan).any():
        return "invalid operation, the result is nan"
    if (result.isinf() & ~infinite & ~nan).any():
        return "overflow or division by zero, the result is infinite"
    return ""


def _nothing(*_: object) -> None:
    """Shapes alone raise nothing."""


_library.impl("check_floating_point", _check, "CompositeExplicitAutograd")
_library.impl("check_floating_point", _nothing, "Meta")
check = torch.ops.ipu.check_floating_point.default
has_side_effect(check)
