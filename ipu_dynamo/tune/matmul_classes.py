"""Sort matmuls into classes, in each of which one library is the faster one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.accumulate import accumulate_matmul
from ipu_dynamo.ops.aten import aten

Form = Literal["a @ b", "a @ b.t()", "a.t() @ b", "a.t() @ b.t()"]
Size = Literal["tiny", "thin", "small", "medium", "large", "batched"]

# The bounds of classes, in operations (a multiplication and an addition are two) and elements. The
# faster library of each class is measured.
_TINY = 4_000_000  # below, a call costs more than a faster library could save
_SMALL, _MEDIUM = 32_000_000, 400_000_000
_THIN = 32


@dataclass(frozen=True, slots=True)
class MatmulClass:
    """Matmuls of float32 on the CPU whose speed is alike.

    Args:
        form: how the operands lie in memory. A layer's forward pass is `a @ b.t()`, the gradient
            of its input `a @ b`, that of its weight `a.t() @ b`.
        size: `thin` has a side of less than 32 elements.
    """

    form: Form
    size: Size

    def __str__(self) -> str:
        return f"{self.size} {self.form}"


# One of each class that is worth measuring; `batched` has eight.
_EXAMPLES: dict[Size, tuple[int, int, int]] = {
    "thin": (8, 512, 512),
    "small": (128, 256, 256),
    "medium": (256, 512, 512),
    "large": (512, 512, 1024),
    "batched": (128, 256, 256),
}
MEASURED = tuple(MatmulClass(form, size) for size in _EXAMPLES for form in get_args(Form)[:3])


MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, accumulate_matmul})


def operations(node: fx.Node) -> int:
    """Those of a matmul: a multiplication and an addition are two."""
    a, b = (value.meta["val"] for value in factors(node))
    return int(2 * a.numel() * b.shape[-1])


def class_of(node: fx.Node) -> MatmulClass | None:
    """The class of a matmul that another library could compute, or None."""
    if not _is_plain_matmul(node):
        return None
    a, b = (value.meta["val"] for value in factors(node))
    ways = _is_transposed(a), _is_transposed(b)
    count = 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
    if None in ways or count == 0 or a.shape[0] == 0:
        return None
    left, right = "a.t()" if ways[0] else "a", "b.t()" if ways[1] else "b"
    form: Form = f"{left} @ {right}"  # type: ignore[assignment]
    if count < _TINY:
        return MatmulClass(form, "tiny")
    if a.dim() == 3:
        return MatmulClass(form, "batched")
    if min(*a.shape, *b.shape) < _THIN:
        return MatmulClass(form, "thin")
    size: Size = "small" if count < _SMALL else "medium" if count < _MEDIUM else "large"
    return MatmulClass(form, size)


def example_of(matmul: MatmulClass) -> tuple[Tensor, Tensor]:
    """Operands of a matmul of a measured class."""
    m, k, n = _EXAMPLES[matmul.size]
    left, right = matmul.form.split(" @ ")
    if matmul.size == "thin" and left == "a.t()":
        m, k = k, m  # few rows of a batch, whose gradients are summed
    batch = (8,) if matmul.size == "batched" else ()
    return _laid_out((*batch, m, k), left == "a.t()"), _laid_out((*batch, k, n), right == "b.t()")


def _laid_out(shape: Sequence[int], transposed: bool) -> Tensor:
    *batch, rows, columns = shape
    if transposed:
        return _laid_out((*batch, columns, rows), transposed=False).transpose(-1, -2)
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def _is_plain_matmul(node: fx.Node) -> bool:
    """Whether a node is a matmul of two float32 on the CPU, or one with a bias for its columns."""
    if node.target is aten.addmm.default:
        bias = node.args[0]
        assert isinstance(bias, fx.Node)
        if node.kwargs or bias.meta["val"].shape != node.meta["val"].shape[-1:]:
            return False
    elif node.target not in (aten.mm.default, aten.bmm.default, accumulate_matmul):
        return False
    values = [value.meta["val"] for value in node.all_input_nodes]
    return all(v.dtype == torch.float32 and v.device.type == "cpu" for v in values)


def factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two operands of a matmul."""
    a, b = node.args[-2:]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    return a, b


def _is_transposed(value: Tensor) -> bool | None:
    """Whether columns lie closely together in memory, and not rows; None: neither do."""
    rows, columns = value.shape[-2:]
    down, across = value.stride()[-2:]
    if (across == 1 or columns == 1) and (down >= columns or rows == 1):
        return False
    if (down == 1 or rows == 1) and (across >= rows or columns == 1):
        return True
    return None
