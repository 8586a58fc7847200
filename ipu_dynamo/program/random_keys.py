"""Make the keys of random streams: one per call, micro-batch and replica."""

import numpy as np
import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def random_keys(
    *,
    seed: int,
    call: int,
    iterations: int,
    accumulation: int,
    replicas: int,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """A key of two int32 words for every micro-batch of a call, in the order [D, A, R].

    Each word depends on all of seed, call, device iteration, accumulation step and replica.
    Source of the mixing function: "splitmix64" (S. Vigna).
    """
    with np.errstate(over="ignore"):
        key = _mix(np.uint64(seed % 2**64))
        key = _mix(key + np.uint64(call))
        keys = _mix(key + np.arange(iterations, dtype=np.uint64))
        keys = _mix(keys[:, None] + np.arange(accumulation, dtype=np.uint64))
        keys = _mix(keys[..., None] + np.arange(replicas, dtype=np.uint64))
    words = keys.reshape(-1, 1).view(np.int32)
    return list(torch.from_numpy(words).to(device).unbind(0))


def update_seed(*, seed: int, call: int, iteration: int) -> int:
    """A 63-bit seed for what one optimiser step draws."""
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.uint64(seed % 2**64)) + np.uint64(call))
        key = _mix(~key + np.uint64(iteration))  # apart from the keys of micro-batches
    return int(key >> np.uint64(1))


def _mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """Spread every bit of 64-bit integers over all 64."""
    value = value + _STEP
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return np.asarray(value ^ (value >> np.uint64(31)))
