"""Compute what a checkpoint computes; when to do so again is the compiler's choice."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ipu_dynamo.capture.private.tracing import flatten
from ipu_dynamo.errors import called_from


def checkpointed(run_function: Callable[..., Any], _preserves: bool, *given: Any) -> Any:
    """The results of `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` in a trace.

    Where no argument needs a gradient, plain PyTorch trains nothing within such a checkpoint. A
    program does, as PopTorch and `torch.compile` do; a warning says so, with the line.
    """
    results = run_function(*given)
    if _needs_gradient(flatten(results)[0]) and not _needs_gradient(given):
        warnings.warn(
            f"no argument of this checkpoint needs a gradient, so that plain PyTorch would train "
            f"nothing within it ({called_from()}); the program trains it, as with "
            f"use_reentrant=False, which says the same to both",
            stacklevel=2,
        )
    return results


def _needs_gradient(values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)
