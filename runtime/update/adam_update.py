"""Execute the Adam rule, AdamW included, on a batch of tensors."""

from torch import Tensor

from ipu_dynamo.ops.private.native import fused_adam_, fused_adamw_
from ipu_dynamo.program.ir.update_rules import Adam
from ipu_dynamo.runtime.update.update_tensors import Batch


class AdamUpdate:
    """Adam or AdamW with the numbers of `Adam.hyperparameters`; `step` was counted before."""

    def __init__(self, rule: Adam, batch: Batch, scale: Tensor | None) -> None:
        self._batch = batch
        self._operator = fused_adamw_ if rule.decoupled_weight_decay else fused_adam_
        self._lists = (
            batch.parameters,
            batch.gradients,
            batch.states["exp_avg"],
            batch.states["exp_avg_sq"],
            batch.states.get("max_exp_avg_sq", []),
            batch.states["step"],
        )
        self._amsgrad, self._maximize = rule.amsgrad, rule.maximize
        self._divisor = batch.scale_by(scale)

    def reload(self) -> None:
        """Nothing to read again: the operator reads all states at every call."""

    def __call__(
        self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
    ) -> None:
        self._operator(
            *self._lists,
            lr=float(lr),
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=self._amsgrad,
            maximize=self._maximize,
            grad_scale=self._divisor,
        )
