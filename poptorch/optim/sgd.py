"""Offer stochastic gradient descent."""

import math
from typing import Any, ClassVar

import torch

from poptorch._logging import logger
from poptorch.errors import createPoptorchError
from poptorch.optim.base import Optimizer, passed

_SCALING = "velocity_scaling"


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent, with or without momentum.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, as for `torch.optim.SGD`. A value that is given here may change after
            compilation, as those of the next seven arguments.
        momentum: as for `torch.optim.SGD`.
        dampening: as for `torch.optim.SGD`.
        weight_decay: as for `torch.optim.SGD`.
        nesterov: as for `torch.optim.SGD`.
        maximize: as for `torch.optim.SGD`.
        foreach: as for `torch.optim.SGD`.
        differentiable: as for `torch.optim.SGD`.
        loss_scaling: factor on the loss during the backward pass.
        velocity_scaling: factor on the velocity; with `use_combined_accum` only.
        use_combined_accum: keep gradients and velocity in one tensor.
        accum_type: of gradients, torch.float16 or torch.float32.
        velocity_accum_type: of the velocity, torch.float16 or torch.float32.
        max_grad_norm: largest norm of all gradients together.
    """

    _OWN: ClassVar = {
        "loss_scaling": 1.0,
        "use_combined_accum": False,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    }
    loss_scaling: float
    use_combined_accum: bool
    accum_type: torch.dtype
    velocity_accum_type: torch.dtype
    max_grad_norm: float

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        check_norm(max_grad_norm)
        self._construct(torch.optim.SGD, params, passed(locals()))
        if self.use_combined_accum:
            self._scale_velocity(1.0 if velocity_scaling is None else velocity_scaling)
        elif velocity_scaling is not None:
            logger.warning("velocity_scaling is ignored without use_combined_accum=True")

    def _scale_velocity(self, scaling: float) -> None:
        self.defaults[_SCALING] = scaling
        for group in self.param_groups:
            group.setdefault(_SCALING, scaling)


def check_norm(max_grad_norm: float | None) -> None:
    """Refuse a largest norm that is no number."""
    if max_grad_norm is not None and math.isnan(max_grad_norm):
        raise createPoptorchError(
            "Maximum norm of gradients cannot be NaN: give max_grad_norm a number, or None for no "
            "limit",
            id="optimizer",
        )
