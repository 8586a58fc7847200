"""Compute convolutions of images as matmuls: the patches of the image times the weight.

Compilers fuse the copying of patches with the operators around it. If images are small or have few
channels, that takes less time than a library of convolutions, which rearranges the weight first.
Source: Chellapilla, Puri and Simard, High performance convolutional neural networks (2006).
"""

from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from ipu_dynamo.ops.patches import by_channel, patches
from ipu_dynamo.ops.private.native import in_memory
from ipu_dynamo.program.ir.layout import dense_strides
from ipu_dynamo.tune.convolution_shape import result_size

_DENSE = torch.contiguous_format  # a clone has the strides of a new tensor, sizes of 1 included


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """f32[n, c, h, w] with f32[o, c, kh, kw], dense."""
    o, _, *kernel = weight.shape
    y = weight.reshape(o, -1) @ patches(_written_densely(x), kernel, stride, padding)
    if bias is not None:
        y = y + bias[:, None]
    size = result_size(x.shape[2:], kernel, stride, padding)
    return y.view(o, len(x), *size).transpose(0, 1).clone(memory_format=_DENSE)


def gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    mask: Sequence[bool],
) -> list[Tensor | None]:
    """Compute the gradients in `mask`, of input (only for a stride of 1), weight and bias."""
    by_channels = by_channel(gradient)
    sizes = len(gradient), *gradient.shape[2:]
    return [
        _of_input(by_channels, sizes, x.shape[2:], weight, padding) if mask[0] else None,
        _of_weight(by_channels, x, weight.shape[2:], stride, padding) if mask[1] else None,
        gradient.sum((0, 2, 3)) if mask[2] else None,
    ]


def _of_input(
    by_channels: Tensor,
    sizes: Sequence[int],
    size: Sequence[int],
    weight: Tensor,
    padding: Sequence[int],
) -> Tensor:
    """f32[n, c, h, w], dense, from f32[o, n * rows * columns], which are `made`; `size` is [h, w].

    Each place of the kernel gave the image, moved by that place, a part of the result. Separate
    sums of rows and columns are fewer operators, but Inductor makes slower code of them.
    """
    o, c, *kernel = weight.shape
    parts = (weight.reshape(o, -1).t() @ by_channels).view(c, *kernel, *sizes)
    _, rows, columns = sizes
    total = None
    for i, j in product(*map(range, kernel)):
        up, left = i - padding[0], j - padding[1]
        if not (-rows < up < size[0] and -columns < left < size[1]):
            continue  # this place of the kernel sees padding only
        moved = F.pad(parts[:, i, j], (left, size[1] - columns - left, up, size[0] - rows - up))
        total = moved if total is None else total + moved
    assert total is not None
    return total.transpose(0, 1).clone(memory_format=_DENSE)


def _of_weight(
    by_channels: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """f32[o, c, kh, kw], from f32[o, n * rows * columns]."""
    gradient = by_channels @ patches(_written_densely(x), kernel, stride, padding).t()
    return gradient.view(-1, x.shape[1], *kernel)


def _written_densely(x: Tensor) -> Tensor:
    """`x` in row-major order, computed once."""
    return in_memory(x, dense_strides(x.shape))
