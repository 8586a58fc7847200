"""Give the loss of a single row the shape that it has, where PyTorch's rule for shapes differs.

`multilabel_margin_loss` of one row, without a reduction, has no dims; the rule that PyTorch 2.13
has for tensors without values says one. The sum over one row is the same number, and has none.

Source   "torch.nn.MultiLabelMarginLoss" in PyTorch's reference: input `(C)`, output a scalar.
"""

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import COMPOSITE

aten = torch.ops.aten
_NONE, _MEAN, _SUM = range(3)  # as PyTorch's operators number reductions


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    if x.dim() <= 1 and reduction == _NONE:
        reduction = _SUM
    loss: Tensor = aten.multilabel_margin_loss_forward(x, target, reduction)[0]
    return loss


aten.multilabel_margin_loss.default.py_impl(COMPOSITE)(_multilabel_margin_loss)
