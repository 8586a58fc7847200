"""Find the number that gradients are divided by: a constant, or more where their norm is too large.

Clipping multiplies by max_grad_norm / max(max_grad_norm, n / divisor), where n is the norm of the
undivided gradients; together with the division that is dividing by max(divisor, n / max_grad_norm).
So clipping costs the norm, and no pass over the gradients of its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ipu_dynamo.program.ir.update_rules import ClipGlobalNorm

_WIDTH = 4096  # a sum of so many elements is never split


class GradientScale:
    """The divisor of a step's gradients, a 0-dim tensor on their device.

    Invariant: `tensor` is the divisor, or after `clip` the larger number that clips as well.

    Args:
        divisor: micro-batches times replicas for an average, times the loss scale if it is fixed.
        loss_scale: a number that multiplies the divisor, as it is at the last `follow`.
        clip: the rule for large norms, if there is one.
        dtype: float32 is applied by the fused operators in their own pass. float64 gradients whose
            divisor float32 cannot hold, or which are clipped, want float64.
    """

    def __init__(
        self,
        divisor: float = 1.0,
        *,
        loss_scale: Tensor | None = None,
        clip: ClipGlobalNorm | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.tensor = torch.full((), divisor, dtype=dtype, device=device)
        self._divisor = self.tensor.clone()
        self._factor, self._loss_scale, self._rule = divisor, loss_scale, clip

    def follow(self) -> None:
        """Divide by what the loss scale is now, from now on."""
        if self._loss_scale is not None:
            self._divisor.copy_(self._loss_scale).mul_(self._factor)
            self.tensor.copy_(self._divisor)

    def clip(self, norms: Tensor) -> None:
        """Choose the divisor for gradients whose norms are the elements of `norms`.

        A norm that is not finite makes the gradients zero or NaN, as multiplying would.
        """
        if self._rule is not None:
            norm = torch.linalg.vector_norm(norms, dtype=self.tensor.dtype).to(self.tensor.device)
            torch.maximum(self._divisor, norm / self._rule.max_grad_norm, out=self.tensor)


class GradientNorms:
    """The L2 norms of gradients, each with the same bits for any number of threads.

    For a norm over several devices, join what each returns, in the program's order, and give that
    to every `GradientScale.clip`.
    """

    def __init__(self, gradients: Sequence[Tensor | None]) -> None:
        self._gradients = [g.detach() for g in gradients if g is not None]
        wide = any(g.dtype == torch.float64 for g in self._gradients)
        self._dtype = torch.float64 if wide else torch.float32

    def __call__(self) -> Tensor:
        """One norm per gradient, float32, or float64 where a gradient is."""
        if not self._gradients:
            return torch.zeros(0, dtype=self._dtype)
        return torch.stack([norm(gradient, self._dtype) for gradient in self._gradients])


def norm(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The L2 norm of `tensor`, summed in an order that does not depend on the number of threads.

    Torch splits one long sum between threads, but many short ones only from row to row.
    """
    flat = tensor.reshape(-1)
    while flat.numel() > _WIDTH:
        whole = flat.numel() // _WIDTH * _WIDTH
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _WIDTH), dim=1, dtype=dtype)
        flat = torch.cat([rows, flat[whole:].to(dtype)])
    total: Tensor = torch.linalg.vector_norm(flat, dtype=dtype)
    return total
