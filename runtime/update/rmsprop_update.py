"""Execute the RMSprop rule on a batch of tensors.

Without centring, its step is Adam's with beta1 = 0 after so many steps that the bias correction of
the second average has become 1. Torch has a fused operator for that, several times as fast as
RMSprop operator by operator. With beta1 = 0 the first average is the gradient (plus weight decay)
of this step: the gradient's own memory serves as that state.
"""

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import (
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_div_,
    foreach_lerp_,
    foreach_neg_,
    foreach_scale_,
    foreach_sqrt_,
    fused_adam_,
)
from ipu_dynamo.program.ir.update_rules import RMSprop
from ipu_dynamo.runtime.update.update_tensors import Batch

_LATE = 2.0**62  # a step at which beta2**step is 0 for every double beta2 < 1, and int64 holds it


class RMSpropUpdate:
    """RMSprop with the numbers of `RMSprop.hyperparameters`. Overwrites the gradients."""

    def __init__(self, rule: RMSprop, batch: Batch, scale: Tensor | None) -> None:
        self._rule, self._batch = rule, batch
        late = torch.full((), _LATE, dtype=torch.float32, device=batch.device)
        self._late = [late] * len(batch.parameters)
        self._divisor = batch.scale_by(scale)

    def reload(self) -> None:
        """Nothing to read again: the operators read all states at every call."""

    def __call__(
        self, lr: float, alpha: float, eps: float, weight_decay: float, momentum: float
    ) -> None:
        lr = float(lr)
        momentum = momentum if self._rule.momentum else 0.0
        if self._rule.tensorflow:
            self._prepare_gradients(weight_decay)
            self._step_of_tensorflow(lr, alpha, eps, momentum)
        elif self._rule.centered or alpha >= 1.0:
            self._prepare_gradients(weight_decay)
            self._step_by_operators(lr, alpha, eps, momentum)
        elif momentum > 0.0:
            self._prepare_gradients(weight_decay)
            buffers = self._batch.states["momentum_buffer"]
            foreach_scale_(buffers, momentum)
            self._fused(buffers, lr=-1.0, alpha=alpha, eps=eps)  # adds s / (sqrt(d) + eps)
            foreach_add_(self._batch.parameters, buffers, alpha=-lr)
        else:
            self._fused(
                self._batch.parameters,
                lr=lr,
                alpha=alpha,
                eps=eps,
                weight_decay=weight_decay,
                maximize=self._rule.maximize,
                grad_scale=self._divisor,
            )

    def _prepare_gradients(self, weight_decay: float) -> None:
        """Turn the gradients into the s of the equations."""
        gradients = self._batch.gradients
        if self._divisor is not None:
            foreach_div_(gradients, self._divisor)
        if self._rule.maximize:
            foreach_neg_(gradients)
        if weight_decay != 0.0:
            foreach_add_(gradients, self._batch.parameters, alpha=weight_decay)

    def _fused(
        self,
        targets: list[Tensor],
        *,
        lr: float,
        alpha: float,
        eps: float,
        weight_decay: float = 0.0,
        maximize: bool = False,
        grad_scale: Tensor | None = None,
    ) -> None:
        """targets <- targets - lr * s / (sqrt(d) + eps)."""
        gradients = self._batch.gradients
        fused_adam_(
            targets,
            gradients,
            gradients,
            self._batch.states["square_avg"],
            [],
            self._late,
            lr=lr,
            beta1=0.0,
            beta2=alpha,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=maximize,
            grad_scale=grad_scale,
        )

    def _step_of_tensorflow(self, lr: float, alpha: float, eps: float, momentum: float) -> None:
        """With eps under the root, and the rate in the momentum."""
        gradients, roots = self._batch.gradients, self._averages(alpha)
        foreach_add_(roots, eps)
        foreach_sqrt_(roots)
        if momentum > 0.0:
            buffers = self._batch.states["momentum_buffer"]
            foreach_scale_(buffers, momentum)
            foreach_addcdiv_(buffers, gradients, roots, value=lr)
            foreach_add_(self._batch.parameters, buffers, alpha=-1.0)
        else:
            foreach_addcdiv_(self._batch.parameters, gradients, roots, value=-lr)

    def _averages(self, alpha: float) -> list[Tensor]:
        """Update the averages; the d of the equations, which may be overwritten."""
        gradients, states = self._batch.gradients, self._batch.states
        squares = states["square_avg"]
        foreach_scale_(squares, alpha)
        foreach_addcmul_(squares, gradients, gradients, value=1.0 - alpha)
        roots = [square.clone() for square in squares]
        if self._rule.centered:
            foreach_lerp_(states["grad_avg"], gradients, 1.0 - alpha)
            foreach_addcmul_(roots, states["grad_avg"], states["grad_avg"], value=-1)
        return roots

    def _step_by_operators(self, lr: float, alpha: float, eps: float, momentum: float) -> None:
        """The operators of `torch.optim.RMSprop`, in its order."""
        gradients, states = self._batch.gradients, self._batch.states
        roots = self._averages(alpha)
        foreach_sqrt_(roots)
        foreach_add_(roots, eps)
        if momentum > 0.0:
            buffers = states["momentum_buffer"]
            foreach_scale_(buffers, momentum)
            foreach_addcdiv_(buffers, gradients, roots)
            foreach_add_(self._batch.parameters, buffers, alpha=-lr)
        else:
            foreach_addcdiv_(self._batch.parameters, gradients, roots, value=-lr)
