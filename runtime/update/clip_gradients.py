"""Clip gradients before an update: by the norm of all of them, or element by element.

Clipping by a norm multiplies by a number c from 0 to 1. Updates divide by 1 / c together with their
other divisors. So it costs the norm, but no further pass over the gradients.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ipu_dynamo.errors import NonFiniteNorm
from ipu_dynamo.ops.updates.update_functions import norm
from ipu_dynamo.program import ClipGlobalNorm, ClipGradNorm
from ipu_dynamo.runtime.update.gradient_scale import GradientScale

_TORCH_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds this to a norm


class GradientNorms:
    """The p-norms of gradients, each with the same bits for any number of threads.

    Args:
        gradients: on one device.
        norm_type: p.
        result: f32[] or f64[]: a call writes the norm of all gradients here, divided by `scale`.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor],
        norm_type: float,
        result: Tensor,
        scale: GradientScale | None,
    ) -> None:
        self._gradients = [gradient.detach() for gradient in gradients]
        self._p, self._result, self._scale = norm_type, result, scale

    def __call__(self) -> None:
        dtype = self._result.dtype
        norms = torch.stack([norm(gradient, dtype, self._p) for gradient in self._gradients])
        total = norm_of_norms(norms, self._p)
        if self._scale is not None:
            self._scale.follow()
            total = total / self._scale.tensor
        self._result.copy_(total)


def clip_divisor(
    rule: ClipGlobalNorm | ClipGradNorm, norms: Sequence[Tensor], result: Tensor
) -> Callable[[], None]:
    """Return a callable that computes the divisor from norms: at least 1, or NaN.

    Raises:
        NonFiniteNorm: when called: the norm is not finite, and the rule wants an error.
    """
    own = [result.new_empty(()) for _ in norms]  # on this device

    def clip() -> None:
        for target, source in zip(own, norms, strict=True):
            target.copy_(source)
        total = norm_of_norms(torch.stack(own), rule.norm_type)
        match rule:
            case ClipGlobalNorm(max_norm=limit):
                # `fmax` drops a NaN: such gradients stay as they are
                result.copy_(torch.fmax(torch.ones_like(total), total / limit))
            case ClipGradNorm(max_norm=limit):
                if rule.error_if_nonfinite and not total.isfinite():
                    raise NonFiniteNorm(total.item(), rule.norm_type)
                coefficient = (limit / (total + _TORCH_EPSILON)).clamp(max=1.0)
                result.copy_(coefficient.reciprocal())

    return clip


def clip_values(
    gradients: Sequence[Tensor], limit: float, scale: GradientScale | None
) -> Callable[[], None]:
    """Return a callable that clips gradients element by element, before `scale` divides them."""
    own = [gradient.detach() for gradient in gradients]
    one = torch.ones((), dtype=torch.float64, device=own[0].device)

    def clip() -> None:
        bound = one * limit
        if scale is not None:
            scale.follow()
            bound = bound * scale.tensor
        for gradient in own:
            gradient.copy_(torch.clamp(gradient, -bound, bound))

    return clip


def norm_of_norms(norms: Tensor, p: float) -> Tensor:
    """Return the p-norm of all tensors together, from the p-norm of each."""
    total: Tensor = torch.linalg.vector_norm(norms, p)
    return total
