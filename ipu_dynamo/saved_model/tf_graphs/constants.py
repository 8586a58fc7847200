"""Read the tensors that a graph has in itself."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ipu_dynamo.saved_model.tf_graphs.dtypes import torch_dtype
from ipu_dynamo.saved_model.tf_graphs.meta_graphs import shape_of

_MOST_BYTES = 1 << 31
_MOST_REPEATED = 1 << 26  # bytes of copies of a list's last value, which the file does not hold
_LISTS = {
    torch.float32: "float_val",
    torch.float64: "double_val",
    torch.int32: "int_val",
    torch.uint8: "int_val",
    torch.int16: "int_val",
    torch.int8: "int_val",
    torch.int64: "int64_val",
    torch.bool: "bool_val",
    torch.float16: "half_val",
    torch.bfloat16: "half_val",
}


def constant_tensor(message: Any, what: str) -> Tensor:
    """The tensor of a message: raw bytes, or a list whose last value fills the shape.

    Raises:
        ValueError: sizes do not fit together.
        NotImplementedError: it is of a type that tensors here have not.
    """
    dtype = torch_dtype(message.dtype, what)
    shape = shape_of(message.shape)
    if shape is None or None in shape:
        raise ValueError(f"{what}: damaged: a constant without a shape")
    count = math.prod(size or 0 for size in shape)
    if count * dtype.itemsize > _MOST_BYTES:
        raise ValueError(f"{what}: damaged: a constant of {count} elements")
    sizes = [int(size or 0) for size in shape]
    if message.tensor_content:
        if len(message.tensor_content) != count * dtype.itemsize:
            raise ValueError(
                f"{what}: damaged: {len(message.tensor_content)} bytes for {count} elements"
            )
        return torch.frombuffer(bytearray(message.tensor_content), dtype=dtype).reshape(sizes)
    values = list(getattr(message, _LISTS[dtype]))
    if len(values) > count:
        raise ValueError(f"{what}: damaged: {len(values)} values for {count} elements")
    if dtype in (torch.float16, torch.bfloat16):
        bits = torch.from_numpy(np.array(values or [0], np.uint16).view(np.int16)).view(dtype)
    else:
        bits = torch.tensor(values or [0], dtype=dtype)
    if len(bits) == 1:
        return bits.expand(count).reshape(sizes)  # one number, however large the shape
    if (count - len(bits)) * dtype.itemsize > _MOST_REPEATED:
        raise ValueError(f"{what}: damaged: {len(values)} values for {count} elements")
    flat = bits[-1:].expand(count).clone()
    flat[: min(len(bits), count)] = bits[:count]
    return flat.reshape(sizes)
