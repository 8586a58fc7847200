"""Compute the cross-entropy of a serialised product in a loop, so that no logits exist whole.

Programs call these four operators, and both engines run them unchanged. `x` is `[rows, width]`,
`rhs` `[width, classes]`, `target` `[rows]`, and the logits are `x @ rhs`. Mode `output_channels`
loops over classes: a first sweep finds the logarithm of each row's sum of exponentials, the
backward pass computes the logits again. Mode `input_channels` loops over rows.
`serialized_loss_step_` computes loss and gradients in one sweep over rows, as a block of rows has
all that its gradient needs. Every sum runs in the order of the loop.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ipu_dynamo.ops.loss_loop import (
    HALF,
    NONE,
    Gradients,
    Head,
    check_targets,
    exp_,
    log_sum_exp_,
    reduced,
    scale_of,
    shift_of,
)

CUTS_ROWS = "ipu.cuts_rows"  # key of a loop's meta: whether the user asked for parts of the rows
_library = torch.library.Library("ipu", "FRAGMENT")
_SETTINGS = "int reduction, int ignore_index, str mode, int factor"
_SAVED = "Tensor grad, Tensor x, Tensor rhs, Tensor target, Tensor total, Tensor log_sum"
_library.define(
    f"serialized_loss(Tensor x, Tensor rhs, Tensor target, {_SETTINGS})"
    " -> (Tensor loss, Tensor total, Tensor log_sum)"
)
_library.define(
    f"serialized_loss_backward({_SAVED}, {_SETTINGS}, bool keep_precision)"
    " -> (Tensor of_x, Tensor of_rhs)"
)
_library.define(
    f"serialized_loss_backward_({_SAVED}, {_SETTINGS}, bool keep_precision, Tensor(a!) of_rhs,"
    " bool transposed, bool accumulate) -> Tensor of_x"
)
_library.define(
    "serialized_loss_step_(Tensor grad, Tensor x, Tensor rhs, Tensor target, int reduction,"
    " int ignore_index, int factor, bool keep_precision, Tensor(a!) of_rhs, bool transposed,"
    " bool accumulate) -> (Tensor loss, Tensor of_x)"
)
serialized_loss = torch.ops.ipu.serialized_loss.default
serialized_loss_backward = torch.ops.ipu.serialized_loss_backward.default
serialized_loss_backward_ = torch.ops.ipu.serialized_loss_backward_.default
serialized_loss_step_ = torch.ops.ipu.serialized_loss_step_.default


def _loss(
    x: Tensor,
    rhs: Tensor,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    mode: str,
    factor: int,
) -> tuple[Tensor, Tensor, Tensor]:
    head = Head(x, rhs, target, ignore_index, mode, factor)
    check_targets(head)
    sum_dtype = torch.float32 if x.dtype in HALF else x.dtype
    log_sum = x.new_full((x.shape[0],), -torch.inf, dtype=sum_dtype)
    wanted = x.new_zeros((x.shape[0],), dtype=sum_dtype)
    memory = head.memory()
    for block in head.blocks:
        top, bottom, _, _ = block
        logits = head.logits(block, memory)
        rows, classes = head.place(block)
        wanted[top:bottom][rows] = logits[classes, rows]
        here = log_sum[top:bottom]
        torch.logaddexp(here, log_sum_exp_(logits), out=here)
        del logits  # before the next ones are made
    total = head.valid.sum().to(sum_dtype)
    return reduced(head, log_sum, wanted, total, reduction), total, log_sum


def _loss_shapes(
    x: Tensor,
    rhs: Tensor,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    mode: str,
    factor: int,
) -> tuple[Tensor, Tensor, Tensor]:
    sum_dtype = torch.float32 if x.dtype in HALF else x.dtype
    rows = x.shape[:1]
    loss = x.new_empty(rows if reduction == NONE else ())
    return loss, x.new_empty((), dtype=sum_dtype), x.new_empty(rows, dtype=sum_dtype)


def _backward_into(
    grad: Tensor,
    x: Tensor,
    rhs: Tensor,
    target: Tensor,
    total: Tensor,
    log_sum: Tensor,
    reduction: int,
    ignore_index: int,
    mode: str,
    factor: int,
    keep_precision: bool,
    of_rhs: Tensor,
    transposed: bool,
    accumulate: bool,
) -> Tensor:
    """Write the gradient of `rhs` to `of_rhs`, or add it; return that of `x`.

    `transposed`: `of_rhs` is `[classes, width]`.
    """
    head = Head(x, rhs, target, ignore_index, mode, factor)
    scale = scale_of(head, grad.to(log_sum.dtype), total, reduction)
    gradients = Gradients.of(head, keep_precision, of_rhs.t() if transposed else of_rhs, accumulate)
    memory = head.memory()
    for block in head.blocks:
        top, bottom, _, _ = block
        share = exp_(head.logits(block, memory).sub_(log_sum[top:bottom]))
        gradients.add(block, share.mul_(scale[top:bottom]), scale)
        del share
    return gradients.finish()


def _step(
    grad: Tensor,
    x: Tensor,
    rhs: Tensor,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    factor: int,
    keep_precision: bool,
    of_rhs: Tensor,
    transposed: bool,
    accumulate: bool,
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of `x`; that of `rhs` is written as `_backward_into` does."""
    head = Head(x, rhs, target, ignore_index, "input_channels", factor)
    check_targets(head)
    sum_dtype = torch.float32 if x.dtype in HALF else x.dtype
    log_sum, wanted = (x.new_zeros((x.shape[0],), dtype=sum_dtype) for _ in range(2))
    total = head.valid.sum().to(sum_dtype)
    scale = scale_of(head, grad.to(sum_dtype), total, reduction)
    gradients = Gradients.of(head, keep_precision, of_rhs.t() if transposed else of_rhs, accumulate)
    memory = head.memory()
    for block in head.blocks:
        top, bottom, _, _ = block
        share = head.logits(block, memory)
        rows, classes = head.place(block)
        wanted[top:bottom][rows] = share[classes, rows]
        shift = shift_of(share)
        sums = exp_(share.sub_(shift)).sum(0)
        torch.add(sums.log(), shift, out=log_sum[top:bottom])
        gradients.add(block, share.mul_(scale[top:bottom] / sums), scale)
        del share
    return reduced(head, log_sum, wanted, total, reduction), gradients.finish()


def _backward(
    grad: Tensor,
    x: Tensor,
    rhs: Tensor,
    target: Tensor,
    total: Tensor,
    log_sum: Tensor,
    reduction: int,
    ignore_index: int,
    mode: str,
    factor: int,
    keep_precision: bool,
) -> tuple[Tensor, Tensor]:
    settings = (reduction, ignore_index, mode, factor, keep_precision)
    of_rhs = torch.empty_like(rhs)
    of_x = _backward_into(grad, x, rhs, target, total, log_sum, *settings, of_rhs, False, False)
    return of_x, of_rhs


def _backward_shapes(grad: Tensor, x: Tensor, rhs: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(rhs)


def _step_shapes(
    grad: Tensor, x: Tensor, rhs: Tensor, target: Tensor, reduction: int, *rest: object
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:1] if reduction == NONE else ()), x.new_empty(x.shape)


for _name, _run, _shapes in (
    ("serialized_loss", _loss, _loss_shapes),
    ("serialized_loss_backward", _backward, _backward_shapes),
    ("serialized_loss_backward_", _backward_into, lambda grad, x, *rest: x.new_empty(x.shape)),
    ("serialized_loss_step_", _step, _step_shapes),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ipu::{_name}", _shapes, lib=_library)


@register_flop_formula(torch.ops.ipu.serialized_loss)
def _loss_flops(x: tuple[int, int], rhs: tuple[int, int], *rest: object, **values: object) -> int:
    return 2 * x[0] * x[1] * rhs[1]


@register_flop_formula(
    [
        torch.ops.ipu.serialized_loss_backward,
        torch.ops.ipu.serialized_loss_backward_,
        torch.ops.ipu.serialized_loss_step_,
    ]
)
def _backward_flops(
    grad: object, x: tuple[int, int], rhs: tuple[int, int], *rest: object, **values: object
) -> int:  # of one sweep as of the backward pass: three products
    return 6 * x[0] * x[1] * rhs[1]
