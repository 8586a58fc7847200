"""Run an optimiser step for lists of parameters: launches that take hyperparameters as floats.

PyTorch's fused kernels define the values of SGD, Adam and plain RMSprop. Where none exists the
rule's function runs, for the whole list or for one parameter after another.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import (
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_div_,
    foreach_lerp_,
    foreach_neg_,
    foreach_scale_,
    foreach_sqrt_,
    foreach_sub_,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
    has_fused_sgd,
)
from ipu_dynamo.ops.updates.update_functions import HYPERPARAMETERS, Flags, lamb, rmsprop, sgd

# The kernel leaves the momentum out, and undampened, when it is 0.0. Where the momentum must be
# kept all the same, the smallest float stands for 0.0: times a momentum it adds nothing.
_NEXT_TO_ZERO = 5e-324
_LATE = 2.0**62  # a step at which beta2**step is 0 for every double beta2 < 1, and int64 holds it


class TensorList(list[Tensor]):
    """Tensors that the methods change in place, each with one call for all of them."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__(tensors)
        own = [*tensors]  # not `self`: the memory of a circle would be kept until it is collected
        self.neg_, self.sqrt_ = partial(foreach_neg_, own), partial(foreach_sqrt_, own)
        self.add_, self.sub_ = partial(foreach_add_, own), partial(foreach_sub_, own)
        self.mul_, self.copy_ = partial(foreach_scale_, own), partial(foreach_copy_, own)
        self.addcmul_ = partial(foreach_addcmul_, own)
        self.addcdiv_, self.lerp_ = partial(foreach_addcdiv_, own), partial(foreach_lerp_, own)

    def clone(self) -> "TensorList":
        return TensorList([tensor.clone() for tensor in self])


class UpdateKernel:
    """The launch of a rule for the parameters that it was made for.

    A call makes a step with the rule's hyperparameters, in their order, and overwrites gradients.
    States of no dimension were counted before.

    Args:
        flags: of the rule.
        parameters, gradients, states: aligned, on one device; within a parameter one dtype and one
            layout.
        divisor: f32[], the gradients are divided by it; None for 1.
    """

    __call__: Callable[..., None]

    def __init__(
        self,
        flags: Flags,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        divisor: Tensor | None,
    ) -> None:
        self.flags, self.divisor = flags, divisor
        self.parameters, self.gradients = TensorList(parameters), TensorList(gradients)
        self.states = {name: TensorList(tensors) for name, tensors in states.items()}

    def reload(self) -> None:
        """Take notice that states were overwritten. Most launches read all of them at each call."""


class AdamKernel(UpdateKernel):
    """Adam or AdamW, by the fused kernel."""

    def __call__(
        self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
    ) -> None:
        decoupled, amsgrad = "decoupled_weight_decay" in self.flags, "amsgrad" in self.flags
        (fused_adamw_ if decoupled else fused_adam_)(
            self.parameters,
            self.gradients,
            self.states["exp_avg"],
            self.states["exp_avg_sq"],
            self.states["max_exp_avg_sq"] if amsgrad else [],  # the kernel reads only the flag
            self.states["step"],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=amsgrad,
            maximize="maximize" in self.flags,
            grad_scale=self.divisor,
        )


class SGDKernel(UpdateKernel):
    """SGD, by the fused kernel where there is one.

    Invariant: `_fresh` holds the places of parameters whose momentum has no value yet, as their
    `momentum_started` says since the last `reload`.
    """

    def __init__(self, *lists: Any) -> None:
        super().__init__(*lists)
        self._fused = all(has_fused_sgd(t.dtype, t.device) for t in self.parameters[:1])
        self.reload()

    def reload(self) -> None:
        """Read again which momenta have a value, after the states were overwritten."""
        started = self.states.get("momentum_started", ())
        self._fresh = [place for place, one in enumerate(started) if not one.item()]

    def __call__(self, lr: float, momentum: float, dampening: float, weight_decay: float) -> None:
        buffers: Sequence[Tensor] = ()
        if "momentum" in self.flags:
            buffers = self.states["momentum_buffer"]  # the kernel reads only the flag
        if momentum == 0.0 and "dampen_first_step" not in self.flags:
            buffers = ()  # as in torch, they keep their values until there is momentum again
        lists, numbers = (self.parameters, self.gradients), (lr, momentum, dampening, weight_decay)
        if not (self._fresh and buffers):
            self._launch(*lists, buffers, False, *numbers)
            return
        fresh = set(self._fresh)
        others = [place for place in range(len(buffers)) if place not in fresh]
        for places, first in ((self._fresh, True), (others, False)):
            if places:
                own = [TensorList([of[i] for i in places]) for of in (*lists, buffers)]
                self._launch(own[0], own[1], own[2], first, *numbers)
        for started in {one.data_ptr(): one for one in self.states["momentum_started"]}.values():
            started.fill_(1.0)
        self._fresh = []

    def _launch(
        self,
        parameters: Any,
        gradients: Any,
        buffers: Any,
        first: bool,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
    ) -> None:
        flags, divisor = self.flags, self.divisor
        if buffers:
            momentum = momentum or _NEXT_TO_ZERO
        if self._fused:
            if "momentum" not in flags:
                momentum = 0.0
                lr = lr * (1.0 - dampening) if "stateless_dampening" in flags else lr
            fused_sgd_(
                parameters,
                gradients,
                [*buffers],
                weight_decay=weight_decay,
                momentum=momentum,
                lr=lr,
                dampening=dampening,
                nesterov="nesterov" in flags,
                maximize="maximize" in flags,
                is_first_step=first,
                grad_scale=divisor,
            )
            return
        if divisor is not None:
            foreach_div_(gradients, divisor)
        numbers = {"lr": lr, "dampening": dampening}
        if momentum != 0.0:
            numbers["momentum"] = momentum
        if weight_decay != 0.0:
            numbers["weight_decay"] = weight_decay
        sgd(parameters, gradients, {"momentum_buffer": buffers}, numbers, flags, first)


class RMSpropKernel(UpdateKernel):
    """RMSprop; without centring by the fused kernel of Adam.

    Its step is Adam's with beta1 = 0 after so many steps that the bias correction of the second
    average has become 1. PyTorch has a fused kernel for that, several times as fast as RMSprop
    operator by operator. With beta1 = 0 the first average is the gradient (plus weight decay) of
    this step: the gradient's own memory serves as that state.
    """

    def __init__(self, *lists: Any) -> None:
        super().__init__(*lists)
        late = [one.new_full((), _LATE, dtype=torch.float32) for one in self.parameters[:1]]
        self._late = late * len(self.parameters)

    def __call__(
        self, lr: float, alpha: float, eps: float, weight_decay: float, momentum: float
    ) -> None:
        flags, gradients, divisor = self.flags, self.gradients, self.divisor
        maximize, keeps = "maximize" in flags, "momentum" in flags and momentum > 0.0
        by_function = "tensorflow" in flags or "centered" in flags or alpha >= 1.0
        if not (by_function or keeps):
            self._fused(
                self.parameters, lr, alpha, eps, weight_decay, maximize=maximize, divisor=divisor
            )
            return
        if divisor is not None:
            foreach_div_(gradients, divisor)
        if by_function:
            numbers = {"lr": lr, "alpha": alpha, "eps": eps}
            if weight_decay != 0.0:
                numbers["weight_decay"] = weight_decay
            if keeps:
                numbers["momentum"] = momentum
            rmsprop(self.parameters, gradients, self.states, numbers, flags)
            return
        if maximize:
            gradients.neg_()
        if weight_decay != 0.0:
            gradients.add_(self.parameters, alpha=weight_decay)
        buffers = self.states["momentum_buffer"]
        buffers.mul_(momentum)
        self._fused(buffers, -1.0, alpha, eps, 0.0)  # adds s / (sqrt(d) + eps)
        self.parameters.add_(buffers, alpha=-lr)

    def _fused(
        self,
        targets: TensorList,
        lr: float,
        alpha: float,
        eps: float,
        weight_decay: float,
        *,
        maximize: bool = False,
        divisor: Tensor | None = None,
    ) -> None:
        """targets <- targets - lr * s / (sqrt(d) + eps)."""
        fused_adam_(
            targets,
            self.gradients,
            self.gradients,
            self.states["square_avg"],
            [],
            self._late,
            lr=lr,
            beta1=0.0,
            beta2=alpha,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=maximize,
            grad_scale=divisor,
        )


class LAMBKernel(UpdateKernel):
    """LAMB, for which PyTorch has no kernel: one parameter after another."""

    def __init__(self, *lists: Any) -> None:
        super().__init__(*lists)
        rows = zip(*self.states.values(), strict=True)
        self._states = [dict(zip(self.states, row, strict=True)) for row in rows]

    def __call__(self, *hyperparameters: float) -> None:
        if self.divisor is not None:
            foreach_div_(self.gradients, self.divisor)
        numbers = dict(zip(HYPERPARAMETERS["lamb"], hyperparameters, strict=True))
        for w, g, states in zip(self.parameters, self.gradients, self._states, strict=True):
            lamb(w, g, states, numbers, self.flags)


KERNELS: Mapping[str, Callable[..., UpdateKernel]] = {
    "sgd": SGDKernel,
    "adam": AdamKernel,
    "rmsprop": RMSpropKernel,
    "lamb": LAMBKernel,
}
