"""Describe tensors by dtype and shape, in the short form that programs print."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
DTYPES: dict[str, torch.dtype] = {  # by the name that torch prints, without `torch.`
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_LONG = DTYPES | {short: dtype for dtype, short in _SHORT.items()}
_TEXT = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]", re.ASCII)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape of a tensor. Prints as `f32[4,8]`."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tensor.dtype, tuple(map(int, tensor.shape)))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def shard(self, count: int) -> "TensorType":
        """One of `count` parts of equal size, of a tensor that is padded with zeros to that end."""
        if count == 1:
            return self
        return TensorType(self.dtype, (-(-prod(self.shape) // count),))

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `str`."""
        match = _TEXT.fullmatch(text)
        dtype = dtype_named(match[1]) if match else None
        if match is None or dtype is None:
            raise ValueError(f"not a tensor type: {text!r}")
        return cls(dtype, tuple(int(size) for size in match[2].split(",") if size))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype in the short form that programs print, such as `f32`."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype | None:
    """Inverse of `dtype_name`, also for the names of torch; None for any other text."""
    return _LONG.get(name)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, whose cells begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def byte_text(nbytes: int) -> str:
    """`nbytes` as people read it: `512 B`, `1.2 KiB`, `3.4 MiB`."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def counted(count: int, one: str, several: str = "") -> str:
    """A number with its noun: `1 row`, `2 rows`.

    Args:
        several: the plural, if it is not `one` with an s.
    """
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"
