"""Execute the SGD rule on a batch of tensors."""

from torch import Tensor

from ipu_dynamo.ops.private.native import (
    foreach_add_,
    foreach_copy_,
    foreach_div_,
    foreach_neg_,
    foreach_scale_,
    fused_sgd_,
    has_fused_sgd,
)
from ipu_dynamo.program.ir.update_rules import SGD
from ipu_dynamo.runtime.update.update_tensors import Batch, distinct

# The operators leave the momentum out, and undampened, when it is 0.0. Where the momentum must be
# kept all the same, the smallest float stands for 0.0: times a momentum it adds nothing.
_NEXT_TO_ZERO = 5e-324


class SGDUpdate:
    """SGD with the numbers of `SGD.hyperparameters`.

    Invariant: `_fresh` holds the places of parameters whose momentum has no value yet, as their
    `momentum_started` says since the last `reload`.
    """

    def __init__(self, rule: SGD, batch: Batch, scale: Tensor | None) -> None:
        self._rule, self._batch = rule, batch
        self._divisor = batch.scale_by(scale)
        self._operator = fused_sgd_ if has_fused_sgd(batch.dtype, batch.device) else foreach_sgd_
        self._buffers = batch.states.get("momentum_buffer", [])
        self._started = batch.states.get("momentum_started", [])
        self.reload()

    def reload(self) -> None:
        """Read again which momenta have a value, after the states were overwritten."""
        self._fresh = [i for i, started in enumerate(self._started) if not started.item()]

    def __call__(self, lr: float, momentum: float, dampening: float, weight_decay: float) -> None:
        rule, lr = self._rule, float(lr)
        buffers = self._buffers
        if not rule.momentum:
            momentum = 0.0
            if rule.stateless_dampening:
                lr *= 1.0 - dampening
        elif rule.dampen_first_step:
            momentum = momentum or _NEXT_TO_ZERO
        elif momentum == 0.0:
            buffers = []  # as in torch, it keeps its value until there is momentum again
        if self._fresh and buffers:
            self._start(lr, momentum, dampening, weight_decay)
        else:
            self._operator(
                self._batch.parameters,
                self._batch.gradients,
                buffers,
                weight_decay=weight_decay,
                momentum=momentum,
                lr=lr,
                dampening=dampening,
                nesterov=rule.nesterov,
                maximize=rule.maximize,
                is_first_step=False,
                grad_scale=self._divisor,
            )

    def _start(self, lr: float, momentum: float, dampening: float, weight_decay: float) -> None:
        """Make the first step of the parameters at `_fresh`, and an ordinary one of the others."""
        fresh = set(self._fresh)
        others = [i for i in range(len(self._buffers)) if i not in fresh]
        for places, is_first in ((self._fresh, True), (others, False)):
            if places:
                self._operator(
                    [self._batch.parameters[i] for i in places],
                    [self._batch.gradients[i] for i in places],
                    [self._buffers[i] for i in places],
                    weight_decay=weight_decay,
                    momentum=momentum,
                    lr=lr,
                    dampening=dampening,
                    nesterov=self._rule.nesterov,
                    maximize=self._rule.maximize,
                    is_first_step=is_first,
                    grad_scale=self._divisor,
                )
        for started in distinct(self._started):
            started.fill_(1.0)
        self._fresh = []


def foreach_sgd_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None,
) -> None:
    """Do what `fused_sgd_` does, rounding after every operator, in the order of `torch.optim.SGD`.

    Overwrites `gradients`.
    """
    if grad_scale is not None:
        foreach_div_(gradients, grad_scale)
    if maximize:
        foreach_neg_(gradients)
    if weight_decay != 0.0:
        foreach_add_(gradients, parameters, alpha=weight_decay)
    if momentum != 0.0:
        if is_first_step:
            foreach_copy_(buffers, gradients)
        else:
            foreach_scale_(buffers, momentum)
            foreach_add_(buffers, gradients, alpha=1.0 - dampening)
        if nesterov:
            foreach_add_(gradients, buffers, alpha=momentum)
        else:
            gradients = buffers
    foreach_add_(parameters, gradients, alpha=-lr)
