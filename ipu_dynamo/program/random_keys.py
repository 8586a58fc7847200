"""Make the keys of random streams: one for every step, micro-batch and replica.

A step is counted from the first one with its seed, over all calls: how steps are grouped into calls
changes no key.
"""

import numpy as np
import torch
from torch import Tensor

from ipu_dynamo.ops.key_mixing import mix


def random_keys(
    *,
    seed: int,
    step: int,
    iterations: int,
    accumulation: int,
    replicas: range,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """A key of two int32 words for every micro-batch of a call, in the order [D, A, R].

    Each word depends on all of seed, step, accumulation step and replica.

    Args:
        step: number of the call's first device iteration.
        replicas: numbers of those in the program that the keys are for.
    """
    with np.errstate(over="ignore"):
        key = mix(np.uint64(seed % 2**64))
        steps = np.uint64(step) + np.arange(iterations, dtype=np.uint64)
        keys = mix(key + steps)
        keys = mix(keys[:, None] + np.arange(accumulation, dtype=np.uint64))
        keys = mix(keys[..., None] + np.arange(replicas.start, replicas.stop, dtype=np.uint64))
    words = keys.reshape(-1, 1).view(np.int32)
    return list(torch.from_numpy(words).to(device).unbind(0))


def update_seed(*, seed: int, step: int, tensor: int) -> int:
    """A 63-bit seed for the draws of a step's update for a tensor, given by a 64-bit number."""
    with np.errstate(over="ignore"):
        key = mix(mix(np.uint64(seed % 2**64)) + np.uint64(step))
        key = mix(~key + np.uint64(tensor))  # apart from the keys of micro-batches
    return int(key >> np.uint64(1))
