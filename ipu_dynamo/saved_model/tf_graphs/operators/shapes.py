"""Compute shapes, and tensors of other shapes."""

from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.saved_model.tf_graphs.dtypes import torch_dtype
from ipu_dynamo.saved_model.tf_graphs.operators.registry import Call, HostInts, operator
from ipu_dynamo.saved_model.tf_graphs.operators.sizes import axis_of

_MOST_HOST_INTS = 64


def _out_type(call: Call) -> torch.dtype:
    return torch_dtype(call.attr("out_type", 3), f"node {call.node.name!r}")


def _shape(value: Any) -> list[Any]:
    if isinstance(value, HostInts):
        return [] if value.is_scalar else [len(value.values)]
    return list(value.shape)


@operator("Shape")
def shape(call: Call) -> HostInts:
    return HostInts(_shape(call.values[0]), _out_type(call))


@operator("Size")
def size(call: Call) -> HostInts:
    count: Any = 1
    for part in _shape(call.values[0]):
        count = count * part
    return HostInts(count, _out_type(call))


@operator("Rank")
def rank(call: Call) -> HostInts:
    return HostInts(len(_shape(call.values[0])), torch.int32)


@operator("Reshape")
def reshape(call: Call) -> Any:
    value, sizes = call.values[0], call.ints(1)
    if isinstance(value, HostInts) and len(sizes) <= 1:
        parts = value.as_list()
        return HostInts(parts if sizes else parts[0], value.dtype)
    return call.tensor(0).reshape(sizes)


@operator("ExpandDims")
def expand_dims(call: Call) -> Any:
    value, axis = call.values[0], call.integer(1)
    if isinstance(value, HostInts) and value.is_scalar:
        return HostInts([value.values], value.dtype)
    return call.tensor(0).unsqueeze(axis)


@operator("Squeeze")
def squeeze(call: Call) -> Any:
    value = call.values[0]
    if isinstance(value, HostInts):
        parts = value.as_list()
        return HostInts(parts[0], value.dtype) if len(parts) == 1 else value
    axes = call.attr("squeeze_dims") or [i for i, n in enumerate(value.shape) if n == 1]
    return value.squeeze([axis_of(axis, value.dim(), call.node.name) for axis in axes])


@operator("Transpose")
def transpose(call: Call) -> Tensor:
    return call.tensor(0).permute(call.ints(1))


@operator("BroadcastTo")
def broadcast_to(call: Call) -> Tensor:
    return call.tensor(0).expand(call.ints(1)).contiguous()


@operator("Fill")
def fill(call: Call) -> Any:
    sizes, value = call.ints(0), call.values[1]
    known = isinstance(value, HostInts) and len(sizes) == 1 and isinstance(sizes[0], int)
    if known and sizes[0] <= _MOST_HOST_INTS:
        return HostInts(value.as_list() * sizes[0], value.dtype)
    return call.tensor(1).expand(sizes).contiguous()


@operator("ZerosLike")
def zeros_like(call: Call) -> Tensor:
    return torch.zeros_like(call.tensor(0))


@operator("OnesLike")
def ones_like(call: Call) -> Tensor:
    return torch.ones_like(call.tensor(0))


@operator("Range")
def range_(call: Call) -> Any:
    if not call.on_host():
        scalars = [tensor for tensor in call.tensors() if tensor.is_floating_point()]
        raise NotImplementedError(
            f"node {call.node.name!r} (Range) takes "
            + ("floating-point limits" if scalars else "limits from the values of tensors")
        )
    start, limit, step = (call.integer(i) for i in range(3))
    dtype = call.values[0].dtype
    if all(isinstance(value, int) for value in (start, limit, step)):
        known = list(range(start, limit, step))
        if len(known) <= _MOST_HOST_INTS:
            return HostInts(known, dtype)
    return torch.arange(start, limit, step, dtype=dtype)
