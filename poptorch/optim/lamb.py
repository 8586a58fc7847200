"""Offer LAMB: Adam whose step is scaled by the norm of the weight."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from poptorch.optim.base import Optimizer, passed


class LAMB(Optimizer, torch.optim.Optimizer):
    """Layer-wise adaptive moments: each tensor moves in proportion to its norm.

    Args:
        params: parameters, or groups of them.
        lr: default 1e-3.
        betas: decay of the two moments, default (0.9, 0.999).
        eps: added to the root of the second moment, default 1e-8.
        weight_decay: of the weight itself, default 1e-2.
        bias_correction: correct the moments for their zero start, default True.
        loss_scaling: factor on the loss during the backward pass.
        max_weight_norm: a larger norm counts as this one, default 65500.
        accum_type: of gradients, torch.float16 or torch.float32.
        first_order_momentum_accum_type: of the mean of gradients, torch.float16 or torch.float32.
        second_order_momentum_accum_type: of the mean of their squares, torch.float16 or
            torch.float32.

    Source: You et al., "Large batch optimization for deep learning", 2020, algorithm 2.
    """

    _OWN: ClassVar = {
        "loss_scaling": 1.0,
        "bias_correction": True,
        "accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
    }
    _DEFAULTS: ClassVar = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "max_weight_norm": 65500.0,
    }
    loss_scaling: float
    bias_correction: bool
    accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        arguments = passed(locals())
        given = {name: arguments[name] for name in self._DEFAULTS if arguments[name] is not None}
        defaults = {**self._DEFAULTS, **given}
        self._construct(torch.optim.Optimizer, params, arguments, defaults=defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the host's parameters from their gradients.

        Args:
            closure: evaluates the model and returns its loss.

        Returns:
            the closure's loss, None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        first, second, count = self._moments(parameter)
        beta1, beta2 = group["betas"]
        count += 1
        first.mul_(beta1).add_(gradient.to(first.dtype), alpha=1 - beta1)
        of_second = gradient.to(second.dtype)
        second.mul_(beta2).addcmul_(of_second, of_second, value=1 - beta2)
        correction1 = 1 - beta1 ** count.item() if self.bias_correction else 1.0
        correction2 = 1 - beta2 ** count.item() if self.bias_correction else 1.0

        weight = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
        root = (second.float() / correction2).sqrt()
        move = (first.float() / correction1) / (root + group["eps"])
        move = move + group["weight_decay"] * weight
        weight_norm = weight.norm().clamp(max=group["max_weight_norm"])
        move_norm = move.norm()
        usable = (weight_norm != 0) & (move_norm != 0)
        trust = torch.where(usable, weight_norm / move_norm, 1.0)
        parameter.copy_(weight - group["lr"] * trust * move)

    def _moments(self, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parameter's two moments and its number of updates, zeros at first."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name, dtype in (
                ("exp_avg", self.first_order_momentum_accum_type),
                ("exp_avg_sq", self.second_order_momentum_accum_type),
            ):
                state[name] = torch.zeros_like(parameter, dtype=dtype)
        return state["exp_avg"], state["exp_avg_sq"], state["step"]
