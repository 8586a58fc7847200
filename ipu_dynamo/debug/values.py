"""Compare two tensors that should be equal within rounding."""

import math
from typing import Any

import torch
from torch import Tensor

_ROUNDING = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}


def kept(value: Any) -> Any:
    """`value`, safe from later changes in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(kept, value)) if type(value) in (tuple, list) else value


def tensors(value: Any) -> list[Tensor]:
    """The tensors in an operator's result."""
    parts = value if isinstance(value, tuple | list) else [value]
    return [part for part in parts if isinstance(part, Tensor)]


def comparable(found: Any, expected: Any) -> bool:
    """Whether two results hold tensors, of the same shapes."""
    shapes = [tensor.shape for tensor in tensors(found)]
    return bool(shapes) and shapes == [tensor.shape for tensor in tensors(expected)]


def error(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest expected number; infinite for another shape,
    or for infinities and NaN in other places."""
    pairs = zip(tensors(found), tensors(expected), strict=True)
    return max(_error(ours, theirs) for ours, theirs in pairs)


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return math.inf
    found, expected = _upcast(found), _upcast(expected)
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return math.inf
    if not torch.equal(expected[~finite].nan_to_num(), found[~finite].nan_to_num()):
        return math.inf
    if not finite.any():
        return 0.0
    found, expected = found[finite], expected[finite]
    off, scale = float((found - expected).abs().max()), float(expected.abs().max())
    if off == 0.0:
        return 0.0
    return off / scale if scale else math.inf


def allowed(found: Tensor, expected: Tensor, rtol: float | None) -> float:
    """The error that rounding explains: `rtol`, or by dtype; none for whole numbers."""
    coarsest = max(_ROUNDING.get(tensor.dtype, 0.0) for tensor in (found, expected))
    return coarsest if rtol is None or not coarsest else rtol


def differ(found: Any, expected: Any, rtol: float | None) -> bool:
    """Whether tensors differ by more than rounding; other values are not compared."""
    pairs = zip(tensors(found), tensors(expected), strict=True)
    return any(_error(ours, theirs) > allowed(ours, theirs, rtol) for ours, theirs in pairs)


def _upcast(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
