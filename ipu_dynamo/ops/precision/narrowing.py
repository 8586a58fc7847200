"""Replace types that the machine does not have by the types that carry their values."""

import warnings

import torch
from torch import Tensor

# PopTorch user guide, "Data types": 64-bit types are carried in 32 bits, bfloat16 as float16.
NARROW = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float16,
    torch.complex128: torch.complex64,
}


def narrowed(tensor: Tensor) -> Tensor:
    """`tensor` in the type that carries it: itself, or a converted copy."""
    dtype = NARROW.get(tensor.dtype)
    return tensor if dtype is None else tensor.to(dtype)


def tell_of_lost_values(name: str, tensor: Tensor, carried: Tensor) -> bool:
    """Warn if numbers of `tensor` are outside the range of the type of `carried`, its copy.

    Rounding is no loss. A copy with the same numbers is checked in some microseconds.

    Args:
        name: kind and name of the tensor, the beginning of the warning.

    Returns:
        Whether there are such numbers.
    """
    if tensor.dtype == torch.int64 and carried.dtype == torch.int32:
        if torch.equal(carried.to(torch.int64), tensor):
            return False
        lost = carried != tensor
    elif NARROW.get(tensor.dtype) != carried.dtype or _sums_up(carried):
        return False
    else:
        lost = torch.isfinite(tensor) & ~torch.isfinite(carried)
        if not lost.any():
            return False
    was, arrives = (t[lost][0].item() for t in (tensor, carried))
    dtype = str(carried.dtype).removeprefix("torch.")
    warnings.warn(
        f"{name} has numbers outside of {dtype} ({int(lost.sum())} of {lost.numel()}): {was} "
        f"arrives as {arrives}; scale them, or map them to a smaller range, before the call",
        stacklevel=2,
    )
    return True


def _sums_up(tensor: Tensor) -> bool:
    """Whether the sum is finite, a fast check that all numbers are; a sum may also overflow."""
    half = tensor.dtype == torch.float16
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32 if half else None)))
