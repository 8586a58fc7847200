"""Round updated weights to half precision up or down at random, without bias.

Source: PopTorch user guide, "poptorch.options._PrecisionOptions.enableStochasticRounding".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ipu_dynamo.runtime.random_keys import update_seed

_DROPPED = 13  # bits of a float32 fraction that a half has no room for
_SMALLEST, _STEP = 2.0**-14, 2.0**-24  # below the first, halves are multiples of the second


class StochasticRounding:
    """Writes float32 numbers to halves.

    Invariant: what it draws between two calls of `begin` depends on the arguments of the first.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def begin(self, *, seed: int, call: int, iteration: int) -> None:
        """Start the stream of one optimiser step."""
        self._generator.manual_seed(update_seed(seed=seed, call=call, iteration=iteration))

    def store(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Round float32 `values` into half `targets`."""
        for target, value in zip(targets, values, strict=True):
            bits = torch.randint(
                1 << _DROPPED, value.shape, dtype=torch.int32, generator=self._generator
            )
            target.copy_(rounded(value, bits.to(value.device)))


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """The half next to f32[...] `x`, above or below, as 13 random `bits` decide."""
    dense = x.contiguous()
    cut = (dense.view(torch.int32) + bits) & -(1 << _DROPPED)
    small = ((dense / _STEP + bits * 2.0**-_DROPPED).floor() * _STEP).to(torch.float32)
    chosen = torch.where(dense.abs() < _SMALLEST, small, cut.view(torch.float32))
    return torch.where(dense.isfinite(), chosen, dense).half()
