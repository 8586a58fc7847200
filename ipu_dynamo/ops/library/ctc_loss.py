"""Define the loss of connectionist temporal classification with lengths that only a run knows.

PyTorch's operator reads lengths while it is traced, and takes no half precision.

Source: Graves et al., "Connectionist temporal classification" (2006), and `torch.ctc_loss`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ipu_dynamo.ops.aten import aten

Reduction = Literal["none", "mean", "sum"]
Lengths = Tensor | int | Sequence[int]

_library = torch.library.Library("ipu", "FRAGMENT")
_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity"
)
_library.define(f"ctc_loss({_ARGUMENTS}) -> Tensor")
_library.define(f"ctc_loss_backward(Tensor gradient, {_ARGUMENTS}) -> Tensor")


def _forward(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The loss of each sequence, `[batch]`, of log-probabilities `[time, batch, classes]`."""
    given = _as_pytorch(log_probs, targets, input_lengths, target_lengths)
    losses: Tensor = aten._ctc_loss.Tensor(*given, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    return losses.to(log_probs.dtype)


def _backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of log-probabilities; computes forward's values of every prefix again."""
    given = _as_pytorch(log_probs, targets, input_lengths, target_lengths)
    losses, prefixes = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    gradient = gradient.to(losses.dtype).contiguous()
    found: Tensor = aten._ctc_loss_backward.Tensor(
        gradient, *given, losses, prefixes, blank, zero_infinity
    )
    return found.to(log_probs.dtype).contiguous()


def _as_pytorch(log_probs: Tensor, targets: Tensor, *lengths: Tensor) -> tuple[Tensor, ...]:
    """In types that PyTorch's kernel has."""
    half = log_probs.dtype in (torch.float16, torch.bfloat16)
    return (
        log_probs.float() if half else log_probs,
        targets.long(),
        *(length.long() for length in lengths),
    )


def _forward_shape(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _backward_shape(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


_library.impl("ctc_loss", _forward, "CompositeExplicitAutograd")
_library.impl("ctc_loss_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::ctc_loss", _forward_shape, lib=_library)
torch.library.register_fake("ipu::ctc_loss_backward", _backward_shape, lib=_library)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _differentiate(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.ipu.ctc_loss_backward(gradient, *context.saved_tensors, *context.settings)
    return found, None, None, None, None, None


torch.library.register_autograd("ipu::ctc_loss", _differentiate, setup_context=_keep, lib=_library)
ctc_loss_op = torch.ops.ipu.ctc_loss.default


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: Reduction = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.ctc_loss` by an operator that programs have.

    Args:
        log_probs: `[time, batch, classes]`, or `[time, classes]` of one sequence.
        targets: `[batch, length]`, or all labels in a row.
        input_lengths, target_lengths: `[batch]`, or as many numbers.
        reduction: `mean` divides each loss by its target's length, but at least 1, first.

    Raises:
        ValueError: another reduction.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    alone = log_probs.dim() == 2
    if alone:
        log_probs = log_probs.unsqueeze(1)
        targets = targets.unsqueeze(0) if targets.dim() == 1 else targets
    of_inputs, of_targets = (
        _lengths(given, log_probs.device) for given in (input_lengths, target_lengths)
    )
    losses: Tensor = torch.ops.ipu.ctc_loss(
        log_probs, targets, of_inputs, of_targets, blank, zero_infinity
    )
    if reduction == "mean":
        return (losses / of_targets.clamp_min(1).to(losses.dtype)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.squeeze(0) if alone else losses


def _lengths(given: Lengths, device: torch.device) -> Tensor:
    if isinstance(given, Tensor):
        return given.reshape(-1)
    return torch.tensor([given] if isinstance(given, int) else list(given), device=device)
