"""Offer Adam, with weight decay in the gradient (Adam) or in the weight (AdamW)."""

import functools
import math
from typing import Any, ClassVar

import torch

from poptorch._logging import logger
from poptorch.optim.base import Optimizer, passed
from poptorch.optim.sgd import check_norm


class Adam(Optimizer, torch.optim.Adam):
    """Adam, always with bias correction.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, as for `torch.optim.Adam`. A value that is given here may change after
            compilation, as those of the next nine arguments.
        betas: as for `torch.optim.Adam`.
        eps: as for `torch.optim.Adam`.
        weight_decay: as for `torch.optim.Adam`.
        amsgrad: as for `torch.optim.Adam`.
        foreach: as for `torch.optim.Adam`.
        maximize: as for `torch.optim.Adam`.
        capturable: as for `torch.optim.Adam`.
        differentiable: as for `torch.optim.Adam`.
        fused: as for `torch.optim.Adam`.
        loss_scaling: factor on the loss during the backward pass.
        accum_type: of gradients, torch.float16 or torch.float32.
        first_order_momentum_accum_type: of the mean of gradients, torch.float16 or torch.float32.
        second_order_momentum_accum_type: of the mean of their squares, torch.float16 or
            torch.float32.
        max_grad_norm: largest norm of all gradients together.
    """

    _OWN: ClassVar = {
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    }
    loss_scaling: float
    accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype
    max_grad_norm: float

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        check_norm(max_grad_norm)
        self._construct(torch.optim.Adam, params, passed(locals()))


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam that decays the weight itself.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, as for `torch.optim.AdamW`. A value that is given here may change after
            compilation, as those of the next nine arguments.
        betas: as for `torch.optim.AdamW`.
        eps: as for `torch.optim.AdamW`.
        weight_decay: as for `torch.optim.AdamW`.
        amsgrad: as for `torch.optim.AdamW`.
        maximize: as for `torch.optim.AdamW`.
        foreach: as for `torch.optim.AdamW`.
        capturable: as for `torch.optim.AdamW`.
        differentiable: as for `torch.optim.AdamW`.
        fused: as for `torch.optim.AdamW`.
        loss_scaling: factor on the loss during the backward pass.
        bias_correction: recorded only; the correction is always made.
        accum_type: of gradients, torch.float16 or torch.float32.
        first_order_momentum_accum_type: of the mean of gradients, torch.float16 or torch.float32.
        second_order_momentum_accum_type: of the mean of their squares, torch.float16 or
            torch.float32.
        max_grad_norm: largest norm of all gradients together.
    """

    _OWN: ClassVar = {**Adam._OWN, "bias_correction": True}
    loss_scaling: float
    bias_correction: bool
    accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype
    max_grad_norm: float

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        check_norm(max_grad_norm)
        self._construct(torch.optim.AdamW, params, passed(locals()))
        if not self.bias_correction:
            _warn_that_bias_is_corrected()


@functools.cache  # once in a process
def _warn_that_bias_is_corrected() -> None:
    logger.warning("AdamW(bias_correction=False) still corrects the bias, as PopTorch 3.4 does")
