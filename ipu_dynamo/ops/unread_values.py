"""Replace PyTorch's own code that reads values in a trace by code that does not.

`cov` and `corrcoef` look whether weights are negative and whether the divisor is positive;
`combinations` selects by a mask that only sizes decide. While tensors have no values, PyTorch calls
these kernels in place of its own; everywhere else it calls its own. How much the CTC loss saves for
its gradient depends on the lengths: the operator that programs have for it saves nothing.

Source   the definitions in PyTorch's reference, "torch.cov", "torch.combinations" and
         "torch.nn.CTCLoss".
"""

from collections.abc import Sequence
from itertools import pairwise
from math import comb
from typing import Literal

import torch
from torch import Tensor

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.library.ctc_loss import ctc_loss
from ipu_dynamo.ops.private.native import COMPOSITE, set_kernel


def _cov(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    if x.dim() > 2:
        raise RuntimeError(f"cov(): expected at most 2 dimensions, and the input has {x.dim()}")
    if x.dtype == torch.bool:
        raise RuntimeError("cov(): bool dtype is not supported for input")
    rows = x.view(1, -1) if x.dim() < 2 else x
    _check_weights("fweights", fweights, rows.shape[1], whole=True)
    _check_weights("aweights", aweights, rows.shape[1], whole=False)
    weights = fweights if aweights is None else aweights
    if fweights is not None and aweights is not None:
        weights = fweights * aweights
    total: Tensor | int = rows.shape[1]
    if weights is None:
        mean = rows.sum(1) / total
    else:
        total = weights.sum()
        mean = (rows * weights).sum(1) / total
    divisor: Tensor | int
    if weights is not None and aweights is not None and correction:
        divisor = total - correction * (weights * aweights).sum() / total
    else:
        divisor = total - correction
    if isinstance(divisor, Tensor):
        divisor = divisor.clamp(min=0)
    centred = rows - mean.unsqueeze(1)
    weighted = centred if weights is None else centred * weights
    products = centred @ weighted.t().conj()
    return (products / (divisor if isinstance(divisor, Tensor) else max(divisor, 0))).squeeze()


def _check_weights(name: str, weights: Tensor | None, count: int, *, whole: bool) -> None:
    """Raise for weights of another kind or number; when the program runs, for negative ones."""
    if weights is None:
        return
    kind = "integral" if whole else "floating point"
    fits = weights.is_floating_point() != whole and weights.dtype != torch.bool
    if weights.dim() > 1 or weights.numel() != count or not fits:
        raise RuntimeError(
            f"cov(): expected {name} to be {count} {kind} numbers, one for each observation"
        )
    aten._assert_async.msg((weights >= 0).all(), f"cov(): {name} cannot be negative")


def _combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    if x.dim() != 1:
        raise RuntimeError(f"Expect a 1D vector, but got shape {list(x.shape)}")
    if r < 0:
        raise RuntimeError(f"Expect a non-negative number, but got {r}")
    if r == 0:
        return x.new_empty(0)
    size = x.shape[0]
    count = comb(size + r - 1 if with_replacement else size, r)
    places = torch.meshgrid([torch.arange(size, device=x.device)] * r, indexing="ij")
    is_skipped = torch.zeros((size,) * r, dtype=torch.bool, device=x.device)
    for before, after in pairwise(places):
        is_skipped = is_skipped | (before > after if with_replacement else before >= after)
    chosen = is_skipped.flatten().sort(stable=True).indices[:count]
    return torch.stack([x[place.flatten()[chosen]] for place in places], 1)


_REDUCTIONS: tuple[Literal["none", "mean", "sum"], ...] = ("none", "mean", "sum")  # as numbered


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    lengths = input_lengths, target_lengths
    return ctc_loss(log_probs, targets, *lengths, blank, _REDUCTIONS[reduction], zero_infinity)


set_kernel(aten.cov.default, COMPOSITE, _cov)
set_kernel(aten.combinations.default, COMPOSITE, _combinations)
set_kernel(aten.ctc_loss.IntList, COMPOSITE, _ctc_loss)
set_kernel(aten.ctc_loss.Tensor, COMPOSITE, _ctc_loss)
