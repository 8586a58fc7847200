"""Define convolutions by PyTorch's own code: patches of the input, times the weight.

Compilers see operators that they do not know, and call them on tensors that lie as traced. Where
images are small, that takes less time than oneDNN, which rearranges the weight in every call.
"""

from math import prod

import torch
from torch import Tensor

aten = torch.ops.aten

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define(
    "native_convolution(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding)"
    " -> Tensor"
)
_library.define(
    "native_convolution_backward(Tensor grad, Tensor x, Tensor weight, int[2] stride,"
    " int[2] padding, bool[3] mask) -> (Tensor, Tensor, Tensor)"
)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has the strides of a new one; sizes of 1 hide it from `is_contiguous`."""
    size = tensor.shape
    return tensor.stride() == tuple(prod(size[dim + 1 :]) for dim in range(len(size)))


def _dense(tensor: Tensor) -> Tensor:
    return tensor if is_dense(tensor) else tensor.new_empty(tensor.shape).copy_(tensor)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]
) -> Tensor:
    """f32[n, c, h, w] with f32[o, c, kh, kw]."""
    size = list(weight.shape[2:])
    given = _dense(x), _dense(weight)
    return _dense(aten._slow_conv2d_forward(*given, size, bias, stride, padding))


def _forward_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]
) -> Tensor:
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    size = [(of + 2 * around - kernel) // step + 1 for of, kernel, step, around in sides]
    return x.new_empty(x.shape[0], weight.shape[0], *size)


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x`, `weight` and bias; those that are not wanted are empty."""
    size, given = list(weight.shape[2:]), map(_dense, (grad, x, weight))
    found = aten._slow_conv2d_backward.output_mask(*given, size, stride, padding, mask)
    of_x, of_weight, of_bias = (
        _dense(gradient) if wanted else grad.new_empty(0)
        for gradient, wanted in zip(found, mask, strict=True)
    )
    return of_x, of_weight, of_bias


def _backward_shapes(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    of_x, of_weight, of_bias = (
        grad.new_empty(shape if wanted else (0,))
        for shape, wanted in zip(shapes, mask, strict=True)
    )
    return of_x, of_weight, of_bias


for _name, _run, _shapes in (
    ("native_convolution", _forward, _forward_shape),
    ("native_convolution_backward", _backward, _backward_shapes),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _shapes, "Meta")

native_convolution = torch.ops.ipu.native_convolution.default
native_convolution_backward = torch.ops.ipu.native_convolution_backward.default
