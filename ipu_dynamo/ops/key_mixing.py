"""Mix the bits of integers, so that neighbours give keys that have nothing to do with each other.

Source of the mixing functions: of 64 bits "splitmix64" (S. Vigna), of 32 bits "lowbias32"
(C. Wellons, hash-prospector).
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)  # of "lowbias32", as its shifts
SHIFTS = (16, 15, 16)

_STEP, _FIRST, _SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def mix_bits(value: Tensor) -> Tensor:
    """Spread every bit of int32 integers over all 32."""
    for shift, factor in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        value = value ^ ((value >> shift) & ((1 << (32 - shift)) - 1))
        value = value * signed(factor) if factor != 1 else value
    return value


def mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """Spread every bit of 64-bit integers over all 64."""
    value = value + _STEP
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return np.asarray(value ^ (value >> np.uint64(31)))


def mixed_key(numbers: Sequence[int]) -> tuple[int, int]:
    """Mix 64-bit integers to two int32 words, which depend on all bits and on their order."""
    with np.errstate(over="ignore"):
        key = mix(np.uint64(len(numbers)))
        for number in numbers:
            key = mix(mix(key) + np.uint64(number % 2**64))
    first, second = key.reshape(1).view(np.int32).tolist()
    return first, second
