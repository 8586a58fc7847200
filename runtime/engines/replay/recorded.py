"""Hold the recording of a function's run."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


class NotRecordedError(Exception):
    """A run cannot be recorded; the message has the reason."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A function in C, called with the addresses of tensors."""

    address: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class MatmulCall:
    """`out[m, n] = a[m, k] @ b[k, n] + bias[m, n]`; None: without a bias."""

    a: Tensor
    b: Tensor
    out: Tensor
    bias: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.b, self.out, *([] if self.bias is None else [self.bias])


@dataclass(frozen=True)
class Recorded:
    """A run.

    Args:
        calls: in order; they hold all tensors, so that no memory had two uses.
        results: of the function.
        constants: tensors that the code has, by the address of their memory.
    """

    calls: tuple[KernelCall | MatmulCall, ...]
    results: tuple[Tensor | None, ...]
    constants: Mapping[int, Tensor]
