"""Describe a convolution by the properties that decide its time."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """A convolution of contiguous float32 on the CPU, in one direction.

    Args:
        x, weight: sizes `[n, c, h, w]` and `[o, c, kh, kw]`.
        mask: which gradients a backward pass computes: of input, weight, bias; a forward pass has
            none of them.
        bias: whether a forward pass adds one.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    mask: tuple[bool, ...] = ()
    bias: bool = False

    @property
    def patches(self) -> int:
        """Elements of all patches."""
        result = result_size(self.x[2:], self.weight[2:], self.stride, self.padding)
        return self.x[0] * prod(result) * prod(self.weight[1:])

    def __str__(self) -> str:
        direction = "backward" if self.mask else "forward"
        x, weight = (" x ".join(map(str, size)) for size in (self.x, self.weight))
        return f"{direction} of {x} with {weight}"


def result_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> list[int]:
    """Rows and columns of a convolution's result."""
    sides = zip(size, kernel, stride, padding, strict=True)
    return [(of + 2 * around - k) // step + 1 for of, k, step, around in sides]
