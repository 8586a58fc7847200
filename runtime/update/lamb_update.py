"""Execute the LAMB rule on a batch of tensors."""

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import foreach_div_
from ipu_dynamo.program.ir.update_rules import LAMB
from ipu_dynamo.runtime.update.clip_gradients import norm
from ipu_dynamo.runtime.update.update_tensors import Batch


class LAMBUpdate:
    """LAMB with the numbers of `LAMB.hyperparameters`; `step` was counted before."""

    def __init__(self, rule: LAMB, batch: Batch, scale: Tensor | None) -> None:
        self._rule, self._batch = rule, batch
        self._divisor = batch.scale_by(scale)
        self._norm_dtype = torch.promote_types(batch.dtype, torch.float32)

    def reload(self) -> None:
        """Nothing to read again: every call reads all states."""

    def __call__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        max_weight_norm: float,
    ) -> None:
        batch = self._batch
        if self._divisor is not None:
            foreach_div_(batch.gradients, self._divisor)
        for weight, gradient, step, mean, square in zip(
            batch.parameters,
            batch.gradients,
            batch.states["step"],
            batch.states["exp_avg"],
            batch.states["exp_avg_sq"],
            strict=True,
        ):
            mean.lerp_(gradient, 1.0 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
            numerator, denominator = mean, square
            if not self._rule.uncorrected:
                count = step.double()  # which makes of a number, but not of an array, a double
                numerator = (mean / (1.0 - beta1**count)).to(mean.dtype)
                denominator = (square / (1.0 - beta2**count)).to(square.dtype)
            change = numerator / (denominator.sqrt() + eps)
            change.add_(weight, alpha=weight_decay)
            weight.sub_(change * (float(lr) * self._trust(weight, change, max_weight_norm)))

    def _trust(self, weight: Tensor, change: Tensor, max_weight_norm: float) -> Tensor:
        """How far to go: as the weight's norm is to that of its change; 1 where one is zero."""
        of_weight = norm(weight, self._norm_dtype).clamp(max=max_weight_norm)
        of_change = norm(change, self._norm_dtype)
        zero = (of_weight == 0) | (of_change == 0)
        return torch.where(zero, 1.0, of_weight / of_change)
