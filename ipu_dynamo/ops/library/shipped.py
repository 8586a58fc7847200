"""Compute the custom operators that are known from the start."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.ops.library.ctc_loss import ctc_loss_op
from ipu_dynamo.ops.library.suppression import suppress_boxes
from ipu_dynamo.ops.library.wrong_inputs import WrongInputs
from ipu_dynamo.ops.marks.step_end import write_at_step_end

_LIBRARY = "ai.graphcore"


def gather_last_dim(data: Tensor, index: Tensor, **_: Any) -> Tensor:
    """Elements of `data` along its last dimension; the other dimensions are those of `index`."""
    if data.dim() != index.dim() or data.shape[:-1] != index.shape[:-1]:
        raise WrongInputs(
            f"data {list(data.shape)} and index {list(index.shape)} differ in more than the last "
            "dimension"
        )
    if data.dtype not in (torch.float32, torch.float16):
        raise WrongInputs(f"data is float32 or float16, not {data.dtype}")
    return data.gather(-1, index.long())


def identity(x: Tensor, **_: Any) -> Tensor:
    """Copy `x`: the operator only changes the placement of a tensor on tiles."""
    return x.clone()


def leaky_relu(x: Tensor, alpha: float = 0.01, **_: Any) -> Tensor:
    """`x`, but `alpha` times `x` where it is negative."""
    return torch.nn.functional.leaky_relu(x, alpha)


def moving_average(weight: Tensor, average: Tensor, share: Tensor, **_: Any) -> Tensor:
    """`share` of an average and the rest of a weight, which the average becomes once in a step."""
    with torch.no_grad():
        wide = torch.promote_types(average.dtype, torch.float32)
        kept = share.reshape(()).to(wide)
        value = kept * _converted(average, wide) + (1 - kept) * _converted(weight, wide)
        value = value.to(average.dtype)
        write_at_step_end(average, value)
    return value


def _converted(variable: Tensor, dtype: torch.dtype) -> Tensor:
    """`variable.to(dtype)`, without the operator if nothing changes.

    A trace takes such a cast for the variable itself. A later reader of the variable would then
    read a result of this operator's block.
    """
    return variable if variable.dtype == dtype else variable.to(dtype)


def ctc_loss_and_gradient(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    reduction: str = "Mean",
    blank: int = 0,
    outDataType: str = "UNDEFINED",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of each sequence's loss for its log-probabilities."""
    arguments = (log_probs, targets, input_lengths, target_lengths)
    losses: Tensor = ctc_loss_op(*arguments, blank, False)
    with torch.no_grad():
        ones = torch.ones_like(losses)
        gradient = torch.ops.ipu.ctc_loss_backward(ones, *arguments, blank, False)
    dtype = {"FLOAT": torch.float32, "FLOAT16": torch.float16}.get(outDataType, losses.dtype)
    losses = losses.to(dtype)
    if reduction == "Sum":
        losses = losses.sum()
    elif reduction == "Mean":
        losses = (losses / target_lengths.clamp_min(1)).mean()
    return losses, gradient


SHIPPED: dict[tuple[str, str, int], Callable[..., Tensor | Sequence[Tensor]]] = {
    ("poptorch.custom_ops", "FastGatherLastDim", 1): gather_last_dim,
    (_LIBRARY, "Ctc", 1): ctc_loss_and_gradient,
    (_LIBRARY, "RemapCE", 1): identity,
    (_LIBRARY, "CopyTensor", 1): identity,
    (_LIBRARY, "Nms", 1): suppress_boxes,
    ("custom.ops", "LeakyRelu", 1): leaky_relu,
    ("com.acme", "LeakyRelu", 1): leaky_relu,
    ("com.acme", "ExpMovAvg", 1): moving_average,
}
