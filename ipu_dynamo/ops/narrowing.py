"""Know which types the machine does not have, and what carries their values instead."""

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
