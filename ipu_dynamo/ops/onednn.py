"""Define matrix products by oneDNN, which take transposed operands as they are.

Compilers see operators that they do not know, and call them; Inductor's own lowering of oneDNN's
product would copy transposed operands first.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ipu_dynamo.ops.private.native import onednn_linear

_ACTIVATIONS = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("onednn_matmul(Tensor a, Tensor b, Tensor? bias, str activation) -> Tensor")
_library.define("onednn_packed(Tensor a, Tensor weight, Tensor? bias, str activation) -> Tensor")
_library.define("onednn_batched(Tensor a, Tensor b) -> Tensor")


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(f32[m, k] @ f32[k, n] + f32[n]); no size is 0."""
    return _packed(a, b.t(), bias, activation)


def _packed(a: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(f32[m, k] @ weight.t() + f32[n]), of f32[n, k] as `onednn_pack` returns it."""
    attribute, algorithm = _ACTIVATIONS[activation]
    return onednn_linear(a, weight, bias, attribute, [], algorithm)


def _batched(a: Tensor, b: Tensor) -> Tensor:
    """f32[batch, m, k] @ f32[batch, k, n], one after the other: oneDNN has no more to offer."""
    pairs = zip(a.unbind(), b.unbind(), strict=True)
    return torch.stack([_matmul(x, y, None, "none") for x, y in pairs])


def _matmul_shape(a: Tensor, b: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _packed_shape(a: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return a.new_empty(a.shape[0], weight.shape[0])


def _batched_shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


for _name, _run, _shape in (
    ("onednn_matmul", _matmul, _matmul_shape),
    ("onednn_packed", _packed, _packed_shape),
    ("onednn_batched", _batched, _batched_shape),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _shape, "Meta")


@register_flop_formula(
    [getattr(torch.ops.ipu, f"onednn_{name}") for name in ("matmul", "packed", "batched")]
)
def _flops(a: Sequence[int], *rest: object, out_shape: Sequence[int]) -> int:
    return 2 * prod(a) * out_shape[-1]


matmul = torch.ops.ipu.onednn_matmul.default
packed = torch.ops.ipu.onednn_packed.default
batched = torch.ops.ipu.onednn_batched.default
