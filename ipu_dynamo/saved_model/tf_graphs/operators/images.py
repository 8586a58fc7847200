"""Compute convolutions, pools and normalisation of images, whose channels are usually last."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ipu_dynamo.saved_model.tf_graphs.operators.registry import Call, operator
from ipu_dynamo.saved_model.tf_graphs.operators.sizes import ceil_div, larger

Pads = list[tuple[Any, Any]]


def _is_last(call: Call) -> bool:
    return bool(call.attr("data_format", "NHWC") == "NHWC")


def _to_first(value: Tensor, call: Call) -> Tensor:
    return value.permute(0, 3, 1, 2) if _is_last(call) else value


def _back(value: Tensor, call: Call) -> Tensor:
    return value.permute(0, 2, 3, 1) if _is_last(call) else value


def _spatial(call: Call, name: str) -> list[int]:
    """Height and width of an attribute that has all four dimensions."""
    values = call.attr(name) or [1, 1, 1, 1]
    return list(values[1:3] if _is_last(call) else values[2:4])


def _pads(call: Call, sizes: Any, kernel: Any, strides: list[int], dilations: list[int]) -> Pads:
    """The padding before and after height and width."""
    kind = call.attr("padding")
    if kind == "VALID":
        return [(0, 0), (0, 0)]
    if kind == "EXPLICIT":
        flat = call.attr("explicit_paddings")
        begin = 2 if _is_last(call) else 4
        return [(flat[begin], flat[begin + 1]), (flat[begin + 2], flat[begin + 3])]
    pads: Pads = []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        reach = (width - 1) * dilation + 1
        total = larger((ceil_div(size, stride) - 1) * stride + reach - size, 0)
        pads.append((total // 2, total - total // 2))
    return pads


def _padded(value: Tensor, pads: Pads, fill: float = 0.0) -> Tensor:
    flat = [n for pair in reversed(pads) for n in pair]
    if all(isinstance(n, int) and n == 0 for n in flat):
        return value
    return F.pad(value, flat, value=fill)


@operator("Conv2D")
def conv2d(call: Call) -> Tensor:
    return _convolved(call, call.tensor(1).permute(3, 2, 0, 1), None)


@operator("DepthwiseConv2dNative")
def depthwise(call: Call) -> Tensor:
    weight = call.tensor(1)
    height, width, channels, multiplier = weight.shape
    weight = weight.permute(2, 3, 0, 1).reshape(channels * multiplier, 1, height, width)
    return _convolved(call, weight, channels)


def _convolved(call: Call, weight: Tensor, groups: int | None) -> Tensor:
    x = _to_first(call.tensor(0), call)
    strides, dilations = _spatial(call, "strides"), _spatial(call, "dilations")
    x = _padded(x, _pads(call, x.shape[2:], weight.shape[2:], strides, dilations))
    groups = groups or x.shape[1] // weight.shape[1]
    return _back(F.conv2d(x, weight, None, strides, 0, dilations, groups), call)


@operator("Conv2DBackpropInput")
def transposed(call: Call) -> Tensor:
    x = _to_first(call.tensor(2), call)
    weight = call.tensor(1).permute(3, 2, 0, 1)
    strides, dilations = _spatial(call, "strides"), _spatial(call, "dilations")
    sizes = call.ints(0)[1:3] if _is_last(call) else call.ints(0)[2:4]
    pads = _pads(call, sizes, weight.shape[2:], strides, dilations)
    whole = F.conv_transpose2d(x, weight, None, strides, 0, 0, 1, dilations)
    for dimension, (size, (before, _)) in enumerate(zip(sizes, pads, strict=True), 2):
        missing = larger(before + size - whole.shape[dimension], 0)
        grown = [0, 0, 0, missing] if dimension == 2 else [0, missing]
        whole = F.pad(whole, grown).narrow(dimension, before, size)
    return _back(whole, call)


@operator("MaxPool")
def max_pool(call: Call) -> Tensor:
    x, kernel, strides = _to_first(call.tensor(0), call), *_window(call)
    x = _padded(x, _pads(call, x.shape[2:], kernel, strides, [1, 1]), float("-inf"))
    return _back(F.max_pool2d(x, kernel, strides), call)


@operator("AvgPool")
def avg_pool(call: Call) -> Tensor:
    x, kernel, strides = _to_first(call.tensor(0), call), *_window(call)
    pads = _pads(call, x.shape[2:], kernel, strides, [1, 1])
    ones = _padded(torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype), pads)
    part = F.avg_pool2d(ones, kernel, strides)  # how much of a window is in the image
    return _back(F.avg_pool2d(_padded(x, pads), kernel, strides) / part, call)


def _window(call: Call) -> tuple[list[int], list[int]]:
    return _spatial(call, "ksize"), _spatial(call, "strides")


@operator("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def batch_norm(call: Call) -> tuple[Tensor, ...]:
    x, scale, offset, mean, variance = (call.tensor(i) for i in range(5))
    kind = x.dtype
    x = x.float() if kind in (torch.float16, torch.bfloat16) else x
    channel = x.dim() - 1 if call.attr("data_format", "NHWC")[-1] == "C" else 1
    shape = [-1 if d == channel else 1 for d in range(x.dim())]
    if call.attr("is_training", True):
        others = [d for d in range(x.dim()) if d != channel]
        mean = x.mean(others)
        variance = ((x - mean.reshape(shape)) ** 2).mean(others)
    factor = torch.rsqrt(variance + call.attr("epsilon", 0.0001)) * scale
    y = (x - mean.reshape(shape)) * factor.reshape(shape) + offset.reshape(shape)
    return y.to(kind), mean, variance


@operator("LRN")
def lrn(call: Call) -> Tensor:
    x, radius = call.tensor(0), call.attr("depth_radius", 5)
    squares = F.pad(x * x, [radius, radius])
    total = squares.unfold(-1, 2 * radius + 1, 1).sum(-1)
    scale = call.attr("bias", 1.0) + call.attr("alpha", 1.0) * total
    return x / torch.pow(scale, call.attr("beta", 0.5))


@operator("ResizeNearestNeighbor")
def resize_nearest(call: Call) -> Tensor:
    x = call.tensor(0)
    for dimension, size in enumerate(call.ints(1), 1):
        place = _places(call, x.shape[dimension], size, center=False)
        place = torch.floor(place + 0.5) if call.attr("align_corners") else torch.floor(place)
        place = place.clamp(0, x.shape[dimension] - 1).to(torch.int64)
        x = x.index_select(dimension, place)
    return x


@operator("ResizeBilinear")
def resize_bilinear(call: Call) -> Tensor:
    x = call.tensor(0).to(torch.float32)
    for dimension, size in enumerate(call.ints(1), 1):
        last = x.shape[dimension] - 1
        place = _places(call, x.shape[dimension], size, center=True)
        low = torch.floor(place)
        share = (place - low).reshape([-1 if d == dimension else 1 for d in range(4)])
        below = x.index_select(dimension, low.clamp(0, last).to(torch.int64))
        above = x.index_select(dimension, (low + 1).clamp(0, last).to(torch.int64))
        x = below + (above - below) * share
    return x


def _places(call: Call, size: Any, wanted: Any, *, center: bool) -> Tensor:
    """Where each result lies among the sources, in float32 as in TensorFlow."""
    index = torch.arange(wanted, dtype=torch.float32)
    if call.attr("align_corners"):
        return torch.mul(index, (size - 1) / larger(wanted - 1, 1))
    scale = size / wanted
    if call.attr("half_pixel_centers"):
        return torch.mul(index + 0.5, scale) - (0.5 if center else 0.0)
    return torch.mul(index, scale)


@operator("SpaceToBatchND")
def space_to_batch(call: Call) -> Tensor:
    x, blocks = call.tensor(0), call.ints(1)
    pads = call.pairs(2)
    rest = x.dim() - 1 - len(blocks)
    x = F.pad(x, [0, 0] * rest + [n for pair in reversed(pads) for n in pair])
    cut: list[Any] = [x.shape[0]]
    for size, block in zip(x.shape[1:], blocks, strict=False):
        cut += [size // block, block]
    tail = list(x.shape[1 + len(blocks) :])
    outer = [1 + 2 * i for i in range(len(blocks))]
    inner = [i + 1 for i in outer]
    order = [*inner, 0, *outer, *range(1 + 2 * len(blocks), 1 + 2 * len(blocks) + rest)]
    moved = x.reshape([*cut, *tail]).permute(order)
    return moved.reshape([-1, *(cut[i] for i in outer), *tail])


@operator("BatchToSpaceND")
def batch_to_space(call: Call) -> Tensor:
    x, blocks = call.tensor(0), call.ints(1)
    crops, count = call.pairs(2), len(blocks)
    total = 1
    for block in blocks:
        total *= block
    batch, sizes = x.shape[0] // total, list(x.shape[1 : 1 + count])
    tail = list(x.shape[1 + count :])
    moved = x.reshape([*blocks, batch, *sizes, *tail])
    pairs = [axis for i in range(count) for axis in (count + 1 + i, i)]
    moved = moved.permute([count, *pairs, *range(2 * count + 1, moved.dim())])
    grown = [size * block for size, block in zip(sizes, blocks, strict=True)]
    y = moved.reshape([batch, *grown, *tail])
    for dimension, ((before, behind), size) in enumerate(zip(crops, grown, strict=True), 1):
        y = y.narrow(dimension, before, size - before - behind)
    return y


@operator("DepthToSpace")
def depth_to_space(call: Call) -> Tensor:
    x, block = _to_last(call.tensor(0), call), call.attr("block_size")
    n, height, width, depth = x.shape
    y = x.reshape(n, height, width, block, block, depth // block**2).permute(0, 1, 3, 2, 4, 5)
    return _from_last(y.reshape(n, height * block, width * block, depth // block**2), call)


@operator("SpaceToDepth")
def space_to_depth(call: Call) -> Tensor:
    x, block = _to_last(call.tensor(0), call), call.attr("block_size")
    n, height, width, depth = x.shape
    y = x.reshape(n, height // block, block, width // block, block, depth)
    y = y.permute(0, 1, 3, 2, 4, 5)
    return _from_last(y.reshape(n, height // block, width // block, block**2 * depth), call)


def _to_last(value: Tensor, call: Call) -> Tensor:
    return value if _is_last(call) else value.permute(0, 2, 3, 1)


def _from_last(value: Tensor, call: Call) -> Tensor:
    return value if _is_last(call) else value.permute(0, 3, 1, 2)
