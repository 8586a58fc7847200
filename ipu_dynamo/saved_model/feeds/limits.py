"""Bound the size of an expression, and of its value."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

LONGEST = 4096  # characters
DEEPEST = 50
MOST_ELEMENTS = 65_536
MOST_BYTES = 1 << 28


class Refused(ValueError):
    """A part of an expression is not in the grammar, or beyond a limit."""

    def __init__(self, part: str, why: str) -> None:
        super().__init__(f"{part!r}: {why}")


def check_integer(value: Any, part: str) -> Any:
    """`value`, unless it is an integer of more than 64 bits, or a list that is too long."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise Refused(part, "an integer of more than 64 bits")
    if isinstance(value, list | tuple):
        check_length(len(value), part)
    return value


def check_length(length: int, part: str) -> None:
    if length > MOST_ELEMENTS:
        raise Refused(part, f"more than {MOST_ELEMENTS} elements")


def check_array_bytes(shape: Sequence[int], itemsize: int, part: str) -> None:
    """Raise if an array of this shape is too large."""
    sizes = [int(size) for size in shape]
    if len(sizes) > 32 or min(sizes, default=0) < 0:
        raise Refused(part, f"no shape of an array: {sizes[:8]}")
    if math.prod(sizes) * itemsize > MOST_BYTES:
        raise Refused(part, f"an array of more than {MOST_BYTES} bytes")


def nested_size(value: Any, part: str) -> int:
    """How many numbers a nested list has; None and others count as one."""
    total, level = 0, [value]
    while level:
        inner: list[Any] = []
        for item in level:
            nested = isinstance(item, list | tuple)
            total += 0 if nested else int(np.size(item))
            if total + len(inner) + (len(item) if nested else 0) > MOST_BYTES // 8:
                raise Refused(part, f"an array of more than {MOST_BYTES} bytes")
            inner.extend(item if nested else ())
        level = inner
    return total
