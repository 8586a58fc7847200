"""Compute a serialised product and its cross-entropy block by block.

`x` is `[rows, width]`, `rhs` `[width, classes]`, `target` `[rows]`, and the logits are `x @ rhs`; a
block of them is `[classes, rows]`, in which order the products are faster.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ipu_dynamo.ops.parts import parts

NONE, MEAN, SUM = range(3)  # reductions, as ATen numbers them
HALF = (torch.float16, torch.bfloat16)
Block = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Head:
    """The operands and settings that all loops have."""

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
    def blocks(self) -> tuple[Block, ...]:
        """First and last row, first and last class of every pass through the loop."""
        rows, classes = self.x.shape[0], self.rhs.shape[1]
        if self.mode == "input_channels":
            return tuple((a, b, 0, classes) for a, b in parts(rows, self.factor))
        return tuple((0, rows, a, b) for a, b in parts(classes, self.factor))

    def memory(self) -> Tensor:
        """For the logits of any block: to ask for memory again in every pass takes long."""
        sizes = [(bottom - top) * (last - first) for top, bottom, first, last in self.blocks]
        return self.x.new_empty(max(sizes, default=0))

    def logits(self, block: Block, memory: Tensor) -> Tensor:
        """Those of a block, `[classes, rows]`, written to `memory`; halves are widened."""
        top, bottom, first, last = block
        shape = last - first, bottom - top
        logits = memory[: shape[0] * shape[1]].view(shape)
        torch.mm(self.rhs[:, first:last].t(), self.x[top:bottom].t(), out=logits)
        return logits.float() if logits.dtype in HALF else logits

    def place(self, block: Block) -> tuple[Tensor, Tensor]:
        """Rows of the block whose target lies in it, and the place of its class."""
        top, bottom, first, last = block
        target = self.target[top:bottom]
        inside = (target >= first) & (target < last) & self.valid[top:bottom]
        rows = inside.nonzero().flatten()
        return rows, target[rows].long() - first


def check_targets(head: Head) -> None:
    """Raise for a class that does not exist, as PyTorch does on the CPU."""
    if not head.target.is_cpu:
        return
    wrong = head.valid & ((head.target < 0) | (head.target >= head.rhs.shape[1]))
    if wrong.any():
        raise IndexError(f"Target {int(head.target[wrong][0])} is out of bounds.")


def log_sum_exp_(logits: Tensor) -> Tensor:
    """The logarithm of each column's sum of exponentials; the logits are overwritten."""
    if not logits.shape[0]:
        return logits.logsumexp(0)
    shift = shift_of(logits)
    return exp_(logits.sub_(shift)).sum(0).log_().add_(shift)


def shift_of(logits: Tensor) -> Tensor:
    """What to subtract from each column, so that no exponential is infinite."""
    highest = logits.amax(0)
    return torch.where(highest.abs() == torch.inf, 0, highest)  # inf - inf is not a number


def exp_(values: Tensor) -> Tensor:
    """Exponentials in place; 0 for subnormal ones, with which processors are many times slower."""
    least = torch.finfo(values.dtype).tiny
    values.clamp_(min=math.log(least)).exp_()
    return torch.threshold_(values, 2 * least, 0.0)


def reduced(head: Head, log_sum: Tensor, wanted: Tensor, total: Tensor, reduction: int) -> Tensor:
    """The loss, from each row's sum of exponentials and the logit of its target."""
    losses = torch.where(head.valid, log_sum - wanted, 0)
    if reduction == MEAN:
        losses = losses.sum() / total
    elif reduction == SUM:
        losses = losses.sum()
    return losses.to(head.x.dtype)


def scale_of(head: Head, grad: Tensor, total: Tensor, reduction: int) -> Tensor:
    """The gradient of each row's loss."""
    return torch.where(head.valid, grad / total if reduction == MEAN else grad, 0)


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of a loss, block by block.

    Args:
        of_x: the sum for `x`.
        of_rhs: where that of `rhs` is wanted, `[width, classes]`.
        sum_of_rhs: the same memory, or a sum of more digits that is rounded once, at the end.
        accumulate: whether the gradient of `rhs` is added to the earlier content of `of_rhs`.
    """

    head: Head
    of_x: Tensor
    of_rhs: Tensor
    sum_of_rhs: Tensor
    accumulate: bool

    @classmethod
    def of(cls, head: Head, keep_precision: bool, of_rhs: Tensor, accumulate: bool) -> "Gradients":
        """Sums of zero."""
        x = head.x
        product = torch.float32 if keep_precision and x.dtype in HALF else x.dtype
        same = product == of_rhs.dtype
        sum_of_rhs = of_rhs if same else torch.empty_like(of_rhs, dtype=product)
        return cls(head, x.new_zeros(x.shape, dtype=product), of_rhs, sum_of_rhs, accumulate)

    @property
    def rounds_at_end(self) -> bool:
        """Whether the sum for `rhs` is rounded at the end."""
        return self.sum_of_rhs is not self.of_rhs

    def add(self, block: Block, share: Tensor, scale: Tensor) -> None:
        """Add a block's part; `share` is the scaled softmax, `[classes, rows]`."""
        top, bottom, first, last = block
        rows, classes = self.head.place(block)
        share[classes, rows] -= scale[top:bottom][rows]
        product = self.of_x.dtype
        share = share.to(product)
        of_rows, of_classes = self.head.x[top:bottom], self.head.rhs[:, first:last]
        self.of_x[top:bottom].addmm_(share.t(), of_classes.t().to(product))
        keep = 0 if (self.rounds_at_end or not self.accumulate) and top == 0 else 1
        total = self.sum_of_rhs[:, first:last]
        _add_matmul(total, of_rows.t().to(product), share.t(), keep)

    def finish(self) -> Tensor:
        """Round the sums; return that for `x`."""
        if self.rounds_at_end and self.accumulate:
            self.of_rhs.add_(self.sum_of_rhs)
        elif self.rounds_at_end:
            self.of_rhs.copy_(self.sum_of_rhs)
        return self.of_x.to(self.head.x.dtype)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor, keep: int) -> None:
    """Make `total`, which lies row by row or column by column, `keep * total + a @ b`."""
    if total.stride(0) == 1:
        total, a, b = total.t(), b.t(), a.t()
    total.addmm_(a, b, beta=keep)
