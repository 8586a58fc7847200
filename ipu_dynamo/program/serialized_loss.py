"""Compute the cross-entropy of a serialised product in a loop, so that no logits exist whole.

Three operators, which programs call and both engines run as they are. `x` is `[rows, width]`, `rhs`
`[width, classes]`, `target` `[rows]`, and the logits are `x @ rhs`. Mode `output_channels` loops
over classes: a first sweep finds the logarithm of each row's sum of exponentials, the backward pass
computes the logits again. Mode `input_channels` loops over rows. Every sum runs in the order of the
loop.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ipu_dynamo.program.parts import parts

NONE, MEAN, SUM = range(3)  # reductions, as ATen numbers them
_HALF = (torch.float16, torch.bfloat16)

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
    " bool turned, bool accumulate) -> Tensor of_x"
)
serialized_loss = torch.ops.ipu.serialized_loss.default
serialized_loss_backward = torch.ops.ipu.serialized_loss_backward.default
serialized_loss_backward_ = torch.ops.ipu.serialized_loss_backward_.default


@dataclass(frozen=True, slots=True)
class _Head:
    """What the loops have in common."""

    x: Tensor
    rhs: Tensor
    target: Tensor
    ignore_index: int
    mode: str
    factor: int

    @property
    def valid(self) -> Tensor:
        """Which rows count."""
        return self.target != self.ignore_index

    @property
    def blocks(self) -> tuple[tuple[int, int, int, int], ...]:
        """First and last row, first and last class of every pass through the loop."""
        rows, classes = self.x.shape[0], self.rhs.shape[1]
        if self.mode == "input_channels":
            return tuple((a, b, 0, classes) for a, b in parts(rows, self.factor))
        return tuple((0, rows, a, b) for a, b in parts(classes, self.factor))

    def memory(self) -> Tensor:
        """For the logits of any block: to ask for memory again in every pass takes long."""
        sizes = [(bottom - top) * (last - first) for top, bottom, first, last in self.blocks]
        return self.x.new_empty(max(sizes, default=0))

    def logits(self, block: tuple[int, int, int, int], memory: Tensor) -> Tensor:
        """Those of a block, `[classes, rows]`, written to `memory`; halves are widened."""
        top, bottom, first, last = block
        shape = last - first, bottom - top
        logits = memory[: shape[0] * shape[1]].view(shape)
        torch.mm(self.rhs[:, first:last].t(), self.x[top:bottom].t(), out=logits)
        return logits.float() if logits.dtype in _HALF else logits

    def place(self, block: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
        """Rows of the block whose target lies in it, and the place of its class."""
        top, bottom, first, last = block
        target = self.target[top:bottom]
        inside = (target >= first) & (target < last) & self.valid[top:bottom]
        rows = inside.nonzero().flatten()
        return rows, target[rows] - first


def _loss(
    x: Tensor,
    rhs: Tensor,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    mode: str,
    factor: int,
) -> tuple[Tensor, Tensor, Tensor]:
    head = _Head(x, rhs, target, ignore_index, mode, factor)
    _check_targets(head)
    wide = torch.float32 if x.dtype in _HALF else x.dtype
    log_sum = x.new_full((x.shape[0],), -torch.inf, dtype=wide)
    wanted = x.new_zeros((x.shape[0],), dtype=wide)
    memory = head.memory()
    for block in head.blocks:
        top, bottom, _, _ = block
        logits = head.logits(block, memory)
        rows, classes = head.place(block)
        wanted[top:bottom][rows] = logits[classes, rows]
        here = log_sum[top:bottom]
        torch.logaddexp(here, _log_sum_exp_(logits), out=here)
        del logits  # before the next ones are made
    losses = torch.where(head.valid, log_sum - wanted, 0)
    total = head.valid.sum().to(wide)
    if reduction == NONE:
        return losses.to(x.dtype), total, log_sum
    loss = losses.sum() / total if reduction == MEAN else losses.sum()
    return loss.to(x.dtype), total, log_sum


def _log_sum_exp_(logits: Tensor) -> Tensor:
    """The logarithm of each column's sum of exponentials; the logits are overwritten."""
    if not logits.shape[0]:
        return logits.logsumexp(0)
    highest = logits.amax(0)
    shift = torch.where(highest.abs() == torch.inf, 0, highest)  # inf - inf is not a number
    return _exp_(logits.sub_(shift)).sum(0).log_().add_(shift)


def _exp_(values: Tensor) -> Tensor:
    """Exponentials in place; 0 for subnormal ones, with which processors are many times slower."""
    least = torch.finfo(values.dtype).tiny
    values.clamp_(min=math.log(least)).exp_()
    return F.threshold_(values, 2 * least, 0.0)


def _loss_shapes(
    x: Tensor,
    rhs: Tensor,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    mode: str,
    factor: int,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float32 if x.dtype in _HALF else x.dtype
    rows = x.shape[:1]
    loss = x.new_empty(rows if reduction == NONE else ())
    return loss, x.new_empty((), dtype=wide), x.new_empty(rows, dtype=wide)


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
    turned: bool,
    accumulate: bool,
) -> Tensor:
    """Write the gradient of `rhs` to `of_rhs`, or add it; return that of `x`.

    `turned`: `of_rhs` is `[classes, width]`.
    """
    of_rhs = of_rhs.t() if turned else of_rhs
    head = _Head(x, rhs, target, ignore_index, mode, factor)
    scale = grad.to(log_sum.dtype)
    scale = torch.where(head.valid, scale / total if reduction == MEAN else scale, 0)
    product = torch.float32 if keep_precision and x.dtype in _HALF else x.dtype
    of_x = x.new_zeros(x.shape, dtype=product)
    apart = product != of_rhs.dtype  # then the sum is rounded once, at the end
    sum_of_rhs = torch.empty_like(of_rhs, dtype=product) if apart else of_rhs
    fresh = apart or not accumulate
    memory = head.memory()
    for block in head.blocks:
        top, bottom, first, last = block
        share = _exp_(head.logits(block, memory).sub_(log_sum[top:bottom]))
        share.mul_(scale[top:bottom])
        rows, classes = head.place(block)
        share[classes, rows] -= scale[top:bottom][rows]
        share = share.to(product)
        of_x[top:bottom].addmm_(share.t(), rhs[:, first:last].t().to(product))
        keep = 0 if fresh and top == 0 else 1
        _add_product(sum_of_rhs[:, first:last], x[top:bottom].t().to(product), share.t(), keep)
        del share
    if apart and accumulate:
        of_rhs.add_(sum_of_rhs)
    elif apart:
        of_rhs.copy_(sum_of_rhs)
    return of_x.to(x.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, keep: int) -> None:
    """Make `total`, which lies row by row or column by column, `keep * total + a @ b`."""
    if total.stride(0) == 1:
        total, a, b = total.t(), b.t(), a.t()
    total.addmm_(a, b, beta=keep)


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


def _check_targets(head: _Head) -> None:
    """Raise for a class that does not exist, as PyTorch does on the CPU."""
    if not head.target.is_cpu:
        return
    wrong = head.valid & ((head.target < 0) | (head.target >= head.rhs.shape[1]))
    if wrong.any():
        raise IndexError(f"Target {int(head.target[wrong][0])} is out of bounds.")


for _name, _run, _shapes in (
    ("serialized_loss", _loss, _loss_shapes),
    ("serialized_loss_backward", _backward, _backward_shapes),
    ("serialized_loss_backward_", _backward_into, lambda grad, x, *rest: x.new_empty(x.shape)),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ipu::{_name}", _shapes, lib=_library)


@register_flop_formula(torch.ops.ipu.serialized_loss)
def _loss_flops(x: tuple[int, int], rhs: tuple[int, int], *rest: object, **values: object) -> int:
    return 2 * x[0] * x[1] * rhs[1]


@register_flop_formula(
    [torch.ops.ipu.serialized_loss_backward, torch.ops.ipu.serialized_loss_backward_]
)
def _backward_flops(
    grad: object, x: tuple[int, int], rhs: tuple[int, int], *rest: object, **values: object
) -> int:
    return 6 * x[0] * x[1] * rhs[1]
