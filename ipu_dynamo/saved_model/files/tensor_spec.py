"""Say of a tensor at the border of a program which type and shape it has, and which a value has to
have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
}
_UNSIGNED = {torch.uint8, torch.uint16, torch.uint32, torch.uint64}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a signature.

    Attributes:
        position: among the flat user inputs or outputs of the program.
        dtype: of `torch`, without its name.
        shape: None stands for a size that calls choose.
    """

    position: int
    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return (
            f"{self.dtype}[{','.join('?' if size is None else str(size) for size in self.shape)}]"
        )

    def to_json(self) -> dict[str, Any]:
        return {"position": self.position, "dtype": self.dtype, "shape": list(self.shape)}

    def fitted(self, name: str, value: Tensor) -> Tensor:
        """`value` in the type of the signature.

        Raises:
            TypeError: it is no tensor, or its type does not go into that of the signature.
            ValueError: its shape is another.
        """
        if not isinstance(value, Tensor):
            raise TypeError(f"input {name!r} is a {type(value).__name__}, not a tensor")
        if not self._fits(value.shape):
            raise ValueError(
                f"input {name!r} has shape {list(value.shape)}, not {_sizes(self.shape)}"
            )
        dtype = DTYPES[self.dtype]
        if value.dtype == dtype:
            return value
        if not can_cast(value.dtype, dtype):
            kind = str(value.dtype).removeprefix("torch.")
            raise TypeError(f"input {name!r} is {kind}, which does not go into {self.dtype}")
        return value.to(dtype)

    def _fits(self, shape: Sequence[int]) -> bool:
        if len(shape) != len(self.shape):
            return False
        for wanted, size in zip(self.shape, shape, strict=True):  # each call comes here
            if wanted is not None and wanted != size:
                return False
        return True


def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast keeps values, up to rounding: numpy's `same_kind`."""
    signed_to_unsigned = target in _UNSIGNED and not (source in _UNSIGNED or source == torch.bool)
    return torch.can_cast(source, target) and not signed_to_unsigned


def spec_of(position: int, value: Tensor) -> TensorSpec:
    """The type and shape of the value of a graph's node."""
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return TensorSpec(position, str(value.dtype).removeprefix("torch."), shape)


def spec_from_json(value: Any, what: str) -> TensorSpec:
    """Inverse of `to_json`.

    Raises:
        ValueError: it is something else.
    """
    fits = (
        isinstance(value, Mapping)
        and value.keys() == {"position", "dtype", "shape"}
        and type(value["position"]) is int
        and value["dtype"] in DTYPES
        and isinstance(value["shape"], list)
        and all(size is None or (type(size) is int and size >= 0) for size in value["shape"])
    )
    if not fits:
        raise ValueError(f"{what}: no position, dtype and shape of a tensor")
    return TensorSpec(value["position"], value["dtype"], tuple(value["shape"]))


def _sizes(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
