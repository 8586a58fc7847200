"""Let models mark matrix products that are to be computed in sequential parts.

`ipu::serialized_matmul` is the mark. It is its own derivative: both gradients of a serialised
product are serialised products, split along the same dimension of the model. The pass
`serialize_matmul` turns all of them into parts.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ipu_dynamo.errors import CompileError, called_from

Mode = Literal["input_channels", "reducing_dim", "output_channels", "none"]
MODES = ("input_channels", "reducing_dim", "output_channels")

# The same dimension of the model, seen from the products that compute the two gradients.
_OF_LEFT = {
    "input_channels": "input_channels",
    "reducing_dim": "output_channels",
    "output_channels": "reducing_dim",
}
_OF_RIGHT = {
    "input_channels": "reducing_dim",
    "reducing_dim": "input_channels",
    "output_channels": "output_channels",
}

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define(
    "serialized_matmul(Tensor lhs, Tensor rhs, str mode, int factor, bool keep_precision) -> Tensor"
)
serialized_matmul_op = torch.ops.ipu.serialized_matmul.default


def _whole(lhs: Tensor, rhs: Tensor, mode: str, factor: int, keep_precision: bool) -> Tensor:
    """The product itself, of matrices or of batches of them."""
    return torch.matmul(lhs, rhs)


def _shape(lhs: Tensor, rhs: Tensor, mode: str, factor: int, keep_precision: bool) -> Tensor:
    return lhs.new_empty([*lhs.shape[:-1], rhs.shape[-1]])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    lhs, rhs, ctx.mode, ctx.factor, ctx.keep_precision = inputs
    ctx.save_for_backward(lhs, rhs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    lhs, rhs = ctx.saved_tensors
    of_left = of_right = None
    if ctx.needs_input_grad[0]:
        of_left = serialized_matmul_op(
            gradient, rhs.transpose(-2, -1), _OF_LEFT[ctx.mode], ctx.factor, ctx.keep_precision
        )
    if ctx.needs_input_grad[1]:
        of_right = serialized_matmul_op(
            lhs.transpose(-2, -1), gradient, _OF_RIGHT[ctx.mode], ctx.factor, ctx.keep_precision
        )
    return of_left, of_right, None, None, None


_library.impl("serialized_matmul", _whole, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::serialized_matmul", _shape, lib=_library)
torch.library.register_autograd(
    "ipu::serialized_matmul", _gradients, setup_context=_save, lib=_library
)


@register_flop_formula(torch.ops.ipu.serialized_matmul)
def _flops(lhs: Sequence[int], rhs: Sequence[int], *rest: object, **values: object) -> int:
    return 2 * prod(lhs) * rhs[-1]


def serialized_matmul(
    lhs: Tensor, rhs: Tensor, mode: Mode, factor: int = 1, keep_precision: bool = False
) -> Tensor:
    """The value of `torch.matmul(lhs, rhs)`, computed in sequential parts to save memory.

    Outside a compiled model it is the ordinary product. Rows of all leading dimensions of `lhs`
    count as one when `rhs` is a matrix.

    Args:
        lhs: floating point, `[..., m, n]`.
        rhs: of the same type, `[..., n, p]`.
        mode: which dimension is split: `input_channels` m, `reducing_dim` n, `output_channels` p;
            `none` computes the ordinary product.
        factor: into how many parts, of equal size or one apart.
        keep_precision: add up parts of half-precision products in float32, and round once.

    Raises:
        CompileError: an unknown mode, or no positive factor. A factor larger than the dimension is
            found when the graph is compiled.

    Source: PopTorch user guide, "poptorch.serializedMatMul".
    """
    if mode not in (*MODES, "none"):
        raise CompileError(
            f"there is no mode {mode!r} of a serialised product",
            where=called_from(),
            hint=f"choose one of {', '.join((*MODES, 'none'))}",
        )
    if mode == "none" or not torch.compiler.is_compiling():
        return torch.matmul(lhs, rhs)
    if not isinstance(factor, int) or factor < 1:
        raise CompileError(
            f"cannot serialise a product in {factor!r} parts",
            where=called_from(),
            hint="choose a factor of at least 1",
        )
    if lhs.dim() < 2 or rhs.dim() < 2:
        raise CompileError(
            f"a serialised product needs matrices, got {lhs.dim()} and {rhs.dim()} dimensions",
            where=called_from(),
            hint="use unsqueeze before it and squeeze after it, or torch.matmul",
        )
    device = lhs.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        lhs, rhs = lhs.to(dtype), rhs.to(dtype)
    if rhs.dim() == 2:
        rows = lhs.reshape(-1, lhs.shape[-1])
        product: Tensor = serialized_matmul_op(rows, rhs, mode, factor, keep_precision)
        return product.reshape(*lhs.shape[:-1], rhs.shape[-1])
    groups = torch.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    left = lhs.expand(*groups, *lhs.shape[-2:]).reshape(-1, *lhs.shape[-2:])
    right = rhs.expand(*groups, *rhs.shape[-2:]).reshape(-1, *rhs.shape[-2:])
    product = serialized_matmul_op(left, right, mode, factor, keep_precision)
    return product.reshape(*groups, lhs.shape[-2], rhs.shape[-1])
