"""Name the types of TensorFlow by their numbers, with those of PyTorch and numpy.

Source: tensorflow/core/framework/types.proto.
"""

import torch

STRING, RESOURCE = 7, 20
TORCH = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}
_OTHERS = {STRING: "string", RESOURCE: "resource", 8: "complex64", 18: "complex128", 21: "variant"}


def torch_dtype(number: int, what: str) -> torch.dtype:
    """The type of that number; those of references are a hundred more.

    Raises:
        NotImplementedError: PyTorch's tensors do not have the type.
    """
    number = number - 100 if number > 100 else number
    if number not in TORCH:
        raise NotImplementedError(f"{what} has type {_OTHERS.get(number, number)}")
    return TORCH[number]
