"""Take parts of tensors, and put tensors together."""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ipu_dynamo.saved_model.tf_graphs.operators.registry import Call, HostInts, operator
from ipu_dynamo.saved_model.tf_graphs.operators.sizes import axis_of


@operator("StridedSlice")
def strided_slice(call: Call) -> Any:
    value = call.values[0]
    begins, ends, steps = call.ints(1), call.ints(2), call.ints(3)
    masks = {
        name: call.attr(f"{name}_mask", 0)
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    items = [
        _item(i, begins[i], ends[i], steps[i], {k: bool(m >> i & 1) for k, m in masks.items()})
        for i in range(len(begins))
    ]
    if isinstance(value, HostInts):
        (item,) = items
        parts = value.as_list()[item]
        return HostInts(parts, value.dtype)
    return _sliced(value, items)


def _item(index: int, begin: Any, end: Any, step: Any, masked: dict[str, bool]) -> Any:
    """The index of one dimension, as between brackets in Python."""
    if masked["ellipsis"]:
        return Ellipsis
    if masked["new_axis"]:
        return None
    if masked["shrink_axis"]:
        return begin
    return slice(None if masked["begin"] else begin, None if masked["end"] else end, step)


def _sliced(value: Tensor, items: list[Any]) -> Tensor:
    """The part that the items say; steps may be negative, which PyTorch's slices are not."""
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    dimension, plain = 0, []
    for item in items:
        if item is Ellipsis:
            dimension += value.dim() - used
        elif item is not None:
            if isinstance(item, slice) and item.step < 0:
                value, item = _reversed(value, dimension, item)
            dimension += 1
        plain.append(item)
    return value[tuple(plain)]


def _reversed(value: Tensor, dimension: int, item: slice) -> tuple[Tensor, slice]:
    size = value.shape[dimension]
    if isinstance(size, int):
        chosen = torch.tensor(range(size)[item], dtype=torch.int64)
        return value.index_select(dimension, chosen), slice(None)
    if item.start is not None or item.stop is not None:
        raise NotImplementedError("a negative step with limits along a size that calls choose")
    return value.flip(dimension), slice(None, None, -item.step)


@operator("Slice")
def slice_(call: Call) -> Any:
    value, begins, sizes = call.values[0], call.ints(1), call.ints(2)
    if isinstance(value, HostInts):
        end = None if sizes[0] == -1 else begins[0] + sizes[0]
        return HostInts(value.as_list()[begins[0] : end], value.dtype)
    for dimension, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        length = value.shape[dimension] - begin if isinstance(size, int) and size == -1 else size
        value = value.narrow(dimension, begin, length)
    return value


@operator("ConcatV2")
def concat(call: Call) -> Any:
    parts = call.values[:-1]
    if all(isinstance(part, HostInts) for part in parts):
        return HostInts([n for part in parts for n in part.as_list()], parts[0].dtype)
    return torch.cat([call.tensor(i) for i in range(len(parts))], call.integer(len(parts)))


@operator("Split")
def split(call: Call) -> tuple[Tensor, ...]:
    axis, value = call.integer(0), call.tensor(1)
    return tuple(value.chunk(call.attr("num_split"), axis))


@operator("SplitV")
def split_v(call: Call) -> tuple[Any, ...]:
    value, sizes, axis = call.tensor(0), call.ints(1), call.integer(2)
    if -1 in sizes:
        known = sum(size for size in sizes if size != -1)
        sizes = [value.shape[axis] - known if size == -1 else size for size in sizes]
    begins = accumulate(sizes, initial=0)
    return tuple(value.narrow(axis, begin, end - begin) for begin, end in pairwise(begins))


@operator("Pack")
def pack(call: Call) -> Any:
    values = call.values
    if all(isinstance(value, HostInts) and value.is_scalar for value in values):
        return HostInts([value.values for value in values], values[0].dtype)
    return torch.stack(call.tensors(), call.attr("axis", 0))


@operator("Unpack")
def unpack(call: Call) -> tuple[Any, ...]:
    value = call.values[0]
    if isinstance(value, HostInts):
        return tuple(HostInts(part, value.dtype) for part in value.as_list())
    return tuple(value.unbind(call.attr("axis", 0)))


@operator("Tile")
def tile(call: Call) -> Tensor:
    return call.tensor(0).repeat(call.ints(1))


@operator("Gather", "GatherV2", "ResourceGather")
def gather(call: Call) -> Any:
    value, indices = call.values[:2]
    axis = call.integer(2) if len(call.values) > 2 else 0
    if isinstance(value, HostInts) and isinstance(indices, HostInts):
        picked = [value.as_list()[index] for index in indices.as_list()]
        return HostInts(picked[0] if indices.is_scalar else picked, value.dtype)
    value, indices = call.tensor(0), call.tensor(1)
    axis = axis_of(axis, value.dim(), call.node.name)
    batch = call.attr("batch_dims", 0)
    batch = batch + indices.dim() if batch < 0 else batch
    if not batch:  # index_select takes no negative index, as TensorFlow does not
        shape = (*value.shape[:axis], *indices.shape, *value.shape[axis + 1 :])
        return value.index_select(axis, indices.reshape(-1)).reshape(shape)
    outer, inner = value.shape[batch:axis], value.shape[axis + 1 :]
    rows = value.reshape(
        _count(value.shape[:batch]), _count(outer), value.shape[axis], _count(inner)
    )
    flat = indices.reshape(rows.shape[0], 1, -1, 1).to(torch.int64)
    chosen = rows.gather(2, flat.expand(-1, rows.shape[1], -1, rows.shape[3]))
    return chosen.reshape(*value.shape[:batch], *outer, *indices.shape[batch:], *inner)


def _count(sizes: Any) -> Any:
    count: Any = 1
    for size in sizes:
        count = count * size
    return count


@operator("GatherNd")
def gather_nd(call: Call) -> Tensor:
    value, indices = call.tensor(0), call.tensor(1).to(torch.int64)
    parts = indices.unbind(-1)
    # a negative index counts from the end in PyTorch, and is an error in TensorFlow
    checked = [torch.where(p < 0, value.shape[i], p) for i, p in enumerate(parts)]
    return value[tuple(checked)]


@operator("ReverseV2")
def reverse(call: Call) -> Tensor:
    return call.tensor(0).flip(call.ints(1))


@operator("OneHot")
def one_hot(call: Call) -> Tensor:
    indices, depth = call.tensor(0), call.integer(1)
    on, off = call.tensor(2), call.tensor(3)
    axis = call.attr("axis", -1)
    axis = indices.dim() if axis == -1 else axis
    places = torch.arange(depth, dtype=indices.dtype)
    places = places.reshape([-1 if d == axis else 1 for d in range(indices.dim() + 1)])
    return torch.where(indices.unsqueeze(axis) == places, on, off)


@operator("MatrixBandPart")
def matrix_band_part(call: Call) -> Tensor:
    value, lower, upper = call.tensor(0), call.integer(1), call.integer(2)
    row = torch.arange(value.shape[-2]).unsqueeze(-1)
    column = torch.arange(value.shape[-1])
    inside = torch.ones_like(row - column, dtype=torch.bool)
    if lower >= 0:
        inside = inside & (row - column <= lower)
    if upper >= 0:
        inside = inside & (column - row <= upper)
    return torch.where(inside, value, torch.zeros_like(value))


@operator("Pad", "PadV2")
def pad(call: Call) -> Tensor:
    value = call.tensor(0)
    pairs = call.pairs(1)
    if len(call.values) == 2:
        return F.pad(value, [n for pair in reversed(pairs) for n in pair])
    for dimension, (before, behind) in enumerate(pairs):
        shape = list(value.shape)
        filled = []
        for count in (before, behind):
            shape[dimension] = count
            filled.append(call.tensor(2).expand(shape))
        value = torch.cat([filled[0], value, filled[1]], dimension)
    return value


@operator("MirrorPad")
def mirror_pad(call: Call) -> Tensor:
    value, edge = call.tensor(0), int(call.attr("mode") == "REFLECT")
    for dimension, (before, behind) in enumerate(call.pairs(1)):
        size = value.shape[dimension]
        if before or behind:
            first = value.narrow(dimension, edge, before).flip(dimension)
            last = value.narrow(dimension, size - edge - behind, behind).flip(dimension)
            value = torch.cat([first, value, last], dimension)
    return value
