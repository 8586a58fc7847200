"""Offer RMSprop."""

from typing import Any, ClassVar

import torch

from poptorch.optim.base import Optimizer, passed


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop, plain or centred, in PyTorch's or TensorFlow's form.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, as for `torch.optim.RMSprop`. A value that is given here may change after
            compilation, as those of the next eight arguments.
        alpha: as for `torch.optim.RMSprop`.
        eps: as for `torch.optim.RMSprop`.
        weight_decay: as for `torch.optim.RMSprop`.
        momentum: as for `torch.optim.RMSprop`.
        centered: as for `torch.optim.RMSprop`.
        foreach: as for `torch.optim.RMSprop`.
        maximize: as for `torch.optim.RMSprop`.
        differentiable: as for `torch.optim.RMSprop`.
        loss_scaling: factor on the loss during the backward pass.
        accum_type: of gradients, torch.float16 or torch.float32.
        first_order_momentum_accum_type: of the mean of squares and, if centred, of the mean of
            gradients; torch.float16 or torch.float32.
        second_order_momentum_accum_type: recorded only, torch.float16 or torch.float32.
        use_tf_variant: add `eps` under the root and start the mean square at 1; on the device
            only, `step()` on the host is PyTorch's.
    """

    _OWN: ClassVar = {
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
        "use_tf_variant": False,
    }
    loss_scaling: float
    accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype
    use_tf_variant: bool

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        self._construct(torch.optim.RMSprop, params, passed(locals()))
