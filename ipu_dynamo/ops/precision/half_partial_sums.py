"""Define products and convolutions of halves whose partial sums are kept in half precision.

The reduction is cut into chunks of K elements. Products of a chunk are summed in float32, and the
sum of a chunk is rounded to float16. These partials are added in order in float16, with a rounding
after each addition. So 2 * P - 1 numbers are rounded for P chunks: the sum of every chunk, and the
sum so far at every addition. Each of them is off by at most 2**-11 of its magnitude, or 2**-25 if
it is subnormal. The error of the result is at most the sum of these errors; those of float32 are
negligible. This approximates the machine, whose steps are finer.

Source: PopTorch user guide, "poptorch.options._PrecisionOptions.setPartialsType".
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("half_partials_matmul(Tensor a, Tensor b, int chunk) -> Tensor")
_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, int groups, int chunk"
_library.define(f"half_partials_conv(Tensor x, Tensor weight, {_GEOMETRY}) -> Tensor")
for _name, _other in (("input", "weight"), ("weight", "x")):
    _library.define(
        f"half_partials_conv_{_name}(SymInt[] shape, Tensor gradient, Tensor {_other}, "
        f"{_GEOMETRY}) -> Tensor"
    )
Sizes = Sequence[int]


def _matmul(a: Tensor, b: Tensor, chunk: int) -> Tensor:
    """The product of f16[..., m, k] and f16[..., k, n], f16[..., m, n]."""
    depth = a.shape[-1]
    total = a.new_zeros((*a.shape[:-1], b.shape[-1]))
    wide_a, wide_b = a.float(), b.float()
    partial = torch.empty(total.shape, dtype=torch.float32, device=a.device)
    for start in range(0, depth, chunk):
        size = min(chunk, depth - start)
        torch.matmul(wide_a.narrow(-1, start, size), wide_b.narrow(-2, start, size), out=partial)
        if start == 0:
            total.copy_(partial)
        else:
            total.add_(partial.half())
    return total


def _conv(
    x: Tensor,
    weight: Tensor,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
    chunk: int,
) -> Tensor:
    """The convolution of f16[n, c, ...] with f16[o, c / groups, ...]."""
    columns, out = _columns(_padded(x, padding), weight.shape[2:], stride, dilation, groups)
    kernel = weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)
    result = _matmul(columns, kernel, chunk)  # [groups, n * out, o / groups]
    return _channels_first(result, x.shape[0], out)


def _conv_input(
    shape: Sizes,
    gradient: Tensor,
    weight: Tensor,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
    chunk: int,
) -> Tensor:
    """The gradient for a convolution's input of `shape`: a convolution of the spread gradient
    with the flipped kernel."""
    n, o, *places = gradient.shape
    kernel = weight.shape[2:]
    spread = gradient.new_zeros(
        (n, o, *[(p - 1) * s + 1 for p, s in zip(places, stride, strict=True)])
    )
    every: tuple[Any, ...] = (..., *[slice(None, None, s) for s in stride])
    spread[every] = gradient
    before = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    after = [
        size + d * (k - 1) - have - first
        for size, d, k, have, first in zip(
            shape[2:], dilation, kernel, spread.shape[2:], before, strict=True
        )
    ]
    pads = [p for pair in zip(reversed(before), reversed(after), strict=True) for p in pair]
    around = torch.nn.functional.pad(spread, pads)
    flipped = weight.flip(list(range(2, weight.dim())))
    flipped = flipped.reshape(groups, o // groups, -1, *kernel).transpose(1, 2)
    flipped = flipped.reshape(-1, o // groups, *kernel)
    none = [0] * len(kernel)
    return _conv(around, flipped, [1] * len(kernel), none, dilation, groups, chunk)


def _conv_weight(
    shape: Sizes,
    gradient: Tensor,
    x: Tensor,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
    chunk: int,
) -> Tensor:
    """The gradient for a convolution's weight of `shape`."""
    columns, out = _columns(_padded(x, padding), shape[2:], stride, dilation, groups)
    places = gradient.shape[0] * prod(out)
    of_group = gradient.reshape(gradient.shape[0], groups, shape[0] // groups, -1)
    left = of_group.permute(1, 2, 0, 3).reshape(groups, shape[0] // groups, places)
    return _matmul(left, columns, chunk).reshape(*shape)


def _padded(x: Tensor, padding: Sizes) -> Tensor:
    return torch.nn.functional.pad(x, [p for size in reversed(padding) for p in (size, size)])


def _places(sizes: Sizes, kernel: Sizes, stride: Sizes, dilation: Sizes) -> list[int]:
    """How often a kernel fits, in every dimension of a padded input."""
    return [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(sizes, kernel, stride, dilation, strict=True)
    ]


def _columns(
    x: Tensor, kernel: Sizes, stride: Sizes, dilation: Sizes, groups: int
) -> tuple[Tensor, list[int]]:
    """Gather the elements under the kernel at every place.

    Returns:
        These, `[groups, n * places, c / groups * kernel]`; the number of places in each dimension.
    """
    n, c, *sizes = x.shape
    out = _places(sizes, kernel, stride, dilation)
    x = x.contiguous()
    steps = x.stride()[2:]
    windows = x.as_strided(
        (n, groups, c // groups, *out, *kernel),
        (
            x.stride(0),
            x.stride(1) * (c // groups),
            x.stride(1),
            *[step * s for step, s in zip(steps, stride, strict=True)],
            *[step * d for step, d in zip(steps, dilation, strict=True)],
        ),
    )
    dims = len(out)
    order = [1, 0, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims)]
    return windows.permute(order).reshape(groups, n * prod(out), -1), out


def _channels_first(result: Tensor, n: int, out: Sizes) -> Tensor:
    """[groups, n * out, o / groups] as [n, o, *out]; dense, as later views rely on that."""
    groups, _, o = result.shape
    parts = result.reshape(groups, n, prod(out), o).permute(1, 0, 3, 2)
    return parts.reshape(n, groups * o, *out).contiguous()


def _matmul_shape(a: Tensor, b: Tensor, chunk: int) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _conv_shape(
    x: Tensor,
    weight: Tensor,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
    chunk: int,
) -> Tensor:
    around = [size + 2 * p for size, p in zip(x.shape[2:], padding, strict=True)]
    sizes = _places(around, weight.shape[2:], stride, dilation)
    return x.new_empty((x.shape[0], weight.shape[0], *sizes))


def _given_shape(shape: Sizes, gradient: Tensor, *_: object) -> Tensor:
    return gradient.new_empty(shape)


for _name, _run, _shape in (
    ("half_partials_matmul", _matmul, _matmul_shape),
    ("half_partials_conv", _conv, _conv_shape),
    ("half_partials_conv_input", _conv_input, _given_shape),
    ("half_partials_conv_weight", _conv_weight, _given_shape),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _shape, "Meta")


@register_flop_formula(torch.ops.ipu.half_partials_matmul)
def _matmul_flops(a: Sizes, b: Sizes, *rest: object, **values: object) -> int:
    return 2 * prod(a) * b[-1]


@register_flop_formula(torch.ops.ipu.half_partials_conv)
def _conv_flops(x: object, weight: Sizes, *rest: object, out_shape: Sizes) -> int:
    return 2 * prod(out_shape) * prod(weight[1:])


@register_flop_formula(torch.ops.ipu.half_partials_conv_input)
def _conv_input_flops(
    shape: object, gradient: Sizes, weight: Sizes, *rest: object, **values: object
) -> int:
    return 2 * prod(gradient) * prod(weight[1:])


@register_flop_formula(torch.ops.ipu.half_partials_conv_weight)
def _conv_weight_flops(shape: Sizes, gradient: Sizes, *rest: object, **values: object) -> int:
    return 2 * prod(gradient) * prod(shape[1:])


matmul = torch.ops.ipu.half_partials_matmul.default
conv = torch.ops.ipu.half_partials_conv.default
conv_input = torch.ops.ipu.half_partials_conv_input.default
conv_weight = torch.ops.ipu.half_partials_conv_weight.default
