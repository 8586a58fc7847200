"""Find the number that gradients are divided by: a constant, times others that change by step."""

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientScale:
    """The divisor of a step's gradients, a 0-dim tensor on their device.

    Invariant: `tensor` is the divisor as its factors were at the last `follow`.

    Args:
        divisor: micro-batches times replicas for an average, times the loss scale if it is fixed.
        factors: numbers that multiply it: a loss scale, or the divisor of clipping.
        dtype: the fused operators apply float32 in their own pass; clipping in float64 needs
            float64.
    """

    def __init__(
        self,
        divisor: float = 1.0,
        *,
        factors: Sequence[Tensor] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.tensor = torch.full((), divisor, dtype=dtype, device=device)
        self._divisor, self._factors = divisor, tuple(factors)

    def follow(self) -> None:
        """Divide by the present product of the factors from now on."""
        if self._factors:
            self.tensor.fill_(self._divisor)
            for factor in self._factors:
                self.tensor.mul_(factor)
