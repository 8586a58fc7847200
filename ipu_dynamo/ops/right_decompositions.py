"""Replace decompositions of PyTorch that compute something else than their operators.

While a model is traced, PyTorch 2.13 writes some operators as others. These differ:

- `multilabel_margin_loss` counts labels after the first -1, and terms that are negative, and gives
  a single row without a reduction a dim. The operator has no dim there.
- `multi_margin_loss` has a gradient where a margin is met exactly, and NaN where an element is NaN.
- `softshrink` and `hardshrink` have another gradient of NaN.
- `upsample_bilinear2d` rounds uint8 in another way, spreads infinities to other elements of a
  picture that keeps its size, and accepts a size of 0.
- `native_group_norm_backward` divides by zero where there are no elements.
- `upsample_nearest` of 1 to 3 dims uses the scale where a size stays or doubles, too. The operators
  copy each element there, in some layouts, or in the gradient only.
- The gradients of means of `mse_loss`, `smooth_l1_loss` and `huber_loss` divide by the number of
  elements in Python, which a batch of no rows ends with an error. The operators give no elements.

The losses are written here, and the others stay operators. `tests/ops/test_right_decompositions.py`
compares every decomposition that is used with its operator.

Source   "torch.nn.MultiLabelMarginLoss" and "torch.nn.MultiMarginLoss" in PyTorch's reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.native import (
    AUTOGRAD,
    COMPOSITE,
    set_decomposition,
    set_kernel,
    upsampled_size,
)

_NONE, _MEAN, _SUM = range(3)  # as PyTorch's operators number reductions


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    size = x.shape[-1] if x.dim() else 1
    if x.dim() > 2 or not size or target.shape != x.shape:
        raise RuntimeError(
            "multilabel_margin_loss(): expected labels of the shape of the input, (C) or (N, C) "
            f"with C > 0, but got {list(target.shape)} and {list(x.shape)}"
        )
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    columns = torch.arange(size, device=x.device)
    ends = torch.where(labels == -1, columns, size).amin(1, keepdim=True)
    is_label = columns < ends
    chosen = torch.where(is_label, labels, 0)
    is_target = ((chosen.unsqueeze(2) == columns) & is_label.unsqueeze(2)).any(1)
    terms = 1 - rows.gather(1, chosen).unsqueeze(2) + rows.unsqueeze(1)
    counts = is_label.unsqueeze(2) & ~is_target.unsqueeze(1) & (terms > 0)
    losses = torch.where(counts, terms, 0).sum((1, 2)) / size
    return _reduced(losses, x.dim() < 2, reduction)


def _multi_margin_loss(
    x: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    size = x.shape[-1] if x.dim() else 1
    if p not in (1, 2):
        raise RuntimeError(f"multi_margin_loss(): expected p of 1 or 2, but got {p}")
    if x.dim() > 2 or not size or target.numel() != (x.shape[0] if x.dim() == 2 else 1):
        raise RuntimeError(
            "multi_margin_loss(): expected an input (C) or (N, C) with C > 0 and one label for "
            f"each row, but got {list(x.shape)} and {list(target.shape)}"
        )
    if weight is not None and weight.numel() != size:
        raise RuntimeError(f"multi_margin_loss(): expected {size} weights, not {weight.numel()}")
    rows, labels = torch.atleast_2d(x), target.reshape(-1, 1)
    terms = margin - rows.gather(1, labels) + rows
    counts = (torch.arange(size, device=x.device) != labels) & (terms > 0)
    terms = torch.where(counts, terms, 0)
    if p == 2:
        terms = terms * terms
    if weight is not None:
        terms = terms * weight.reshape(-1)[labels]
    return _reduced(terms.sum(1) / size, target.dim() == 0, reduction)


def _reduced(losses: Tensor, is_single: bool, reduction: int) -> Tensor:
    if reduction == _MEAN:
        return losses.mean()
    return losses.sum() if reduction == _SUM or is_single else losses


def _group_norm_backward(written: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        gradient: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        gamma: Tensor | None,
        rows: int,
        channels: int,
        size: int,
        groups: int,
        needed: Sequence[bool],
    ) -> Any:
        if channels * size:
            return written(
                gradient, x, mean, rstd, gamma, rows, channels, size, groups, list(needed)
            )
        of_weights = (x if gamma is None else gamma).new_zeros(channels)
        nothing = (torch.zeros_like(x), of_weights, of_weights.clone())
        return tuple(n if keep else None for n, keep in zip(nothing, needed, strict=True))

    return run


def _of_any_rows(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a loss, of a mean over no elements too."""

    def of_any_rows(grad: Tensor, x: Tensor, target: Tensor, reduction: int, *more: Any) -> Any:
        return gradient(grad, x, target, reduction if x.numel() else _SUM, *more)

    return of_any_rows


def _by_size(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator that makes a picture larger, by a size or by factors, which may be symbols."""

    def larger(x: Tensor, size: Sequence[int] | None, *more: Any) -> Tensor:
        *corners, factors = more
        sizes = upsampled_size(x.shape, size, factors)
        return operator(x, sizes, *corners, *(factors or [None] * len(sizes)))

    return larger


set_kernel(aten.multilabel_margin_loss.default, COMPOSITE, _multilabel_margin_loss)
set_kernel(aten.multi_margin_loss.default, AUTOGRAD, _multi_margin_loss)
set_decomposition(aten.native_group_norm_backward.default, _group_norm_backward)
for _operator in (aten.softshrink.default, aten.hardshrink.default):
    set_kernel(_operator, AUTOGRAD, None)
for _packet in (
    aten.upsample_bilinear2d,
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
):
    for _key in (AUTOGRAD, COMPOSITE):
        set_kernel(_packet.default, _key, None)
        set_kernel(_packet.vec, _key, _by_size(_packet.default) if _key is COMPOSITE else None)
for _gradient in (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
):
    set_decomposition(_gradient, _of_any_rows)
