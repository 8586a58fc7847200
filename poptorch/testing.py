"""Compare results of models."""

from typing import Any

import torch
from torch import Tensor


def allclose(ref: Any, other: Any) -> bool:
    """Return whether two structures of tensors are equal up to rounding.

    Lists and tuples are compared element by element, if they are of the same type and length.
    Other values are not compared.

    Args:
        ref: the expected tensor, or a list or tuple of such structures.
        other: the structure to compare; the tolerances are those of `torch.allclose`.
    """
    if isinstance(ref, Tensor):
        return isinstance(other, Tensor) and torch.allclose(other, ref)
    if isinstance(ref, list | tuple):
        if type(other) is not type(ref) or len(other) != len(ref):
            return False
        return all(allclose(*pair) for pair in zip(ref, other, strict=True))
    return True


__all__ = ["allclose"]
