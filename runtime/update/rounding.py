"""Round updated weights to half precision up or down at random, without bias.

Source: PopTorch user guide, "poptorch.options._PrecisionOptions.enableStochasticRounding".
"""

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor

from ipu_dynamo.ops.precision.half_precision import DROPPED_BITS, SMALLEST_NORMAL, STEP
from ipu_dynamo.program.random_keys import update_seed


class HalfRounder:
    """Writes float32 numbers to halves.

    Invariant: the numbers drawn for a tensor depend only on its name and the arguments of the last
    `begin`. They do not depend on other tensors: IPUs may update theirs in any order.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._seed = self._step = 0
        self._keys: dict[int, int] = {}  # by address

    def begin(self, *, seed: int, step: int) -> None:
        """Start the streams of one optimiser step."""
        self._seed, self._step = seed, step

    def name(self, target: Tensor, name: str) -> None:
        """Name a tensor for its draws; it must stay at its place in memory."""
        digest = sha256(name.encode()).digest()
        self._keys[target.data_ptr()] = int.from_bytes(digest[:8], "little")

    def store(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Round float32 `values` into half `targets`."""
        for target, value in zip(targets, values, strict=True):
            key = self._keys.get(target.data_ptr(), 0)
            seed = update_seed(seed=self._seed, step=self._step, tensor=key)
            self._generator.manual_seed(seed)
            bits = torch.randint(
                1 << DROPPED_BITS, value.shape, dtype=torch.int32, generator=self._generator
            )
            target.copy_(rounded(value, bits.to(value.device)))


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """The half next to f32[...] `x`, above or below, as 13 random `bits` decide."""
    dense = x.contiguous()
    cut = (dense.view(torch.int32) + bits) & -(1 << DROPPED_BITS)
    small = ((dense / STEP + bits * 2.0**-DROPPED_BITS).floor() * STEP).to(torch.float32)
    chosen = torch.where(dense.abs() < SMALLEST_NORMAL, small, cut.view(torch.float32))
    return torch.where(dense.isfinite(), chosen, dense).half()
