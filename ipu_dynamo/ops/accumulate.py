"""Add gradients of matmuls and of table lookups to an accumulator in place.

Programs call these two operators, and both engines run them unchanged. For a matmul, the library
that computes it also writes the sum. For a table, only the rows that were read are written.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("accumulate_matmul(Tensor(a!) total, bool adds, Tensor a, Tensor b) -> ()")
_library.define("accumulate_rows(Tensor(a!) total, Tensor indices, Tensor rows) -> ()")


def _matmul(total: Tensor, adds: bool, a: Tensor, b: Tensor) -> None:
    """total[m, n] = a[m, k] @ b[k, n], or that is added to it; one dtype."""
    if adds:
        torch.addmm(total, a, b, out=total)
    else:
        torch.mm(a, b, out=total)


def _rows(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """total[indices[i]] += rows[i] for i = 0, 1, ...; [n, d], int64[k] and [k, d]."""
    total.index_add_(0, indices, rows)


def _nothing(*_: object) -> None:
    """Return nothing: the shape function of both operators."""


_library.impl("accumulate_matmul", _matmul, "CompositeExplicitAutograd")
_library.impl("accumulate_rows", _rows, "CompositeExplicitAutograd")
for _name in ("accumulate_matmul", "accumulate_rows"):
    _library.impl(_name, _nothing, "Meta")

accumulate_matmul = torch.ops.ipu.accumulate_matmul.default
accumulate_rows = torch.ops.ipu.accumulate_rows.default


@register_flop_formula(torch.ops.ipu.accumulate_matmul)
def _flops(
    total: object, adds: bool, a: tuple[int, int], b: tuple[int, int], **values: object
) -> int:
    return 2 * a[0] * a[1] * b[1]
