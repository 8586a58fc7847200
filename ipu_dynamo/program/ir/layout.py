"""Describe the layout of a tensor in one word: its type, strides and device."""

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Self

import torch

from ipu_dynamo.program.ir.types import DTYPES, TensorType

_TEXT = re.compile(r"(\w+\[[\d,]*\])(?:\{((?:\d+(?:,\d+)*)?)\})?(?:@(\w+(?::\d+)?))?", re.ASCII)
_DEVICE = re.compile(r"(?:cpu|cuda|meta|mps|xpu)(?::\d\d?)?", re.ASCII)
_QUANTIZED = {dtype for name, dtype in DTYPES.items() if name.startswith(("qint", "quint"))}
_LARGEST = 2**62  # bytes; more than any machine has, and what torch can count


@dataclass(frozen=True, slots=True)
class Layout:
    """The facts of a tensor that a program knows before it runs.

    Prints as its type, and as `f32[4,8]{1,4}@cuda:0` if it is not dense or not on the CPU.

    Args:
        stride: in elements, one for each dimension.
        device: as torch prints it.
    """

    type: TensorType
    stride: tuple[int, ...]
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """The layout of a strided tensor.

        Raises:
            ValueError: it is sparse.
        """
        if tensor.layout != torch.strided:
            raise ValueError(f"a tensor with the layout {tensor.layout} has no strides")
        stride = tuple(map(int, tensor.stride()))
        return cls(TensorType.of(tensor), stride, str(tensor.device))

    def __str__(self) -> str:
        return _text(self)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `str`."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not a tensor's type and layout: {text!r}")
        type_ = TensorType.parse(match[1])
        if type_.dtype in _QUANTIZED:
            raise ValueError(f"quantized tensors have more than strides: {text!r}")
        stride = dense_strides(type_.shape)
        if match[2] is not None:
            stride = tuple(int(step) for step in match[2].split(",") if step)
        if len(stride) != len(type_.shape):
            raise ValueError(f"{len(type_.shape)} sizes and {len(stride)} strides: {text!r}")
        layout = cls(type_, stride, str(device_named(match[3] or "cpu")))
        elements = prod(max(size, 1) for size in type_.shape)
        if max(layout.reach(), elements, *stride) * type_.dtype.itemsize > _LARGEST:
            raise ValueError(f"too large for any machine: {text!r}")
        return layout

    def reach(self, start: int = 0) -> int:
        """The elements of memory up to its last one, if its first one is number `start`."""
        sizes = zip(self.type.shape, self.stride, strict=True)
        return start + 1 + sum(max(size - 1, 0) * step for size, step in sizes)

    def empty(self, device: str | None = None) -> torch.Tensor:
        """A tensor with this layout, or one on another device."""
        type_ = self.type
        return torch.empty_strided(
            type_.shape, self.stride, dtype=type_.dtype, device=device or self.device
        )


@lru_cache(maxsize=4096)  # programs have few layouts, and print each of them often
def _text(layout: Layout) -> str:
    dense = layout.stride == dense_strides(layout.type.shape)
    stride = "" if dense else f"{{{','.join(map(str, layout.stride))}}}"
    device = "" if layout.device == "cpu" else f"@{layout.device}"
    return f"{layout.type}{stride}{device}"


def device_named(text: str) -> torch.device:
    """The device that prints as `text`; ValueError if torch has none of that kind."""
    if not _DEVICE.fullmatch(text):
        raise ValueError(f"not a device: {text!r}")
    return torch.device(text)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
