"""Identify tensors by their contents."""

from hashlib import sha256

import torch
from torch import Tensor

from ipu_dynamo.program.ir.types import TensorType


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's dtype, shape and values, whatever its strides and device."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    hashed = sha256(f"{TensorType.of(tensor)} ".encode())
    hashed.update(values.view(torch.uint8).numpy().data)
    return hashed.hexdigest()[:16]
