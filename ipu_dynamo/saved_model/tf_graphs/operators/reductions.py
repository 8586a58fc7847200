"""Reduce dimensions, and sort elements along them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.saved_model.tf_graphs.dtypes import torch_dtype
from ipu_dynamo.saved_model.tf_graphs.operators.registry import Call, HostInts, operator
from ipu_dynamo.saved_model.tf_graphs.operators.sizes import axis_of, larger, smaller


def _reduction(
    name: str,
    function: Callable[[Tensor, list[int], bool], Tensor],
    host: Callable[[Any, Any], Any] | None = None,
) -> None:
    def compute(call: Call) -> Any:
        value, axes = call.values[0], call.ints(1)
        if isinstance(value, HostInts):
            if host and not value.is_scalar and value.values and not call.attr("keep_dims"):
                total, *rest = value.values
                for part in rest:
                    total = host(total, part)
                return HostInts(total, value.dtype)
            value = value.tensor()
        axes = sorted({axis_of(axis, value.dim(), call.node.name) for axis in axes})
        return function(value, axes, bool(call.attr("keep_dims"))) if axes else value

    operator(name)(compute)


def _one_by_one(function: Callable[[Tensor, int, bool], Tensor]) -> Any:
    """Of a function of one dimension, one of several."""

    def reduce(value: Tensor, axes: list[int], keep: bool) -> Tensor:
        for axis in reversed(axes):
            value = function(value, axis, keep)
        return value

    return reduce


def _sum(value: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sum(value, axes, keep, dtype=value.dtype)


def _prod(value: Tensor, axis: int, keep: bool) -> Tensor:
    return torch.prod(value, axis, keep, dtype=value.dtype)


_reduction("Sum", _sum, lambda a, b: a + b)
_reduction("Mean", torch.mean)
_reduction("Max", torch.amax, larger)
_reduction("Min", torch.amin, smaller)
_reduction("Prod", _one_by_one(_prod), lambda a, b: a * b)
_reduction("All", _one_by_one(torch.all))
_reduction("Any", _one_by_one(torch.any))


@operator("ArgMax")
def arg_max(call: Call) -> Tensor:
    value, axis = call.tensor(0), call.integer(1)
    axis = axis_of(axis, value.dim(), call.node.name)
    # of equal values the first, which torch.argmax does not promise
    place = torch.arange(value.shape[axis]).reshape([-1, *[1] * (value.dim() - axis - 1)])
    is_best = value == value.amax(axis, keepdim=True)
    first = torch.where(is_best, place, value.shape[axis]).amin(axis)
    return first.to(torch_dtype(call.attr("output_type", 9), f"node {call.node.name!r}"))


@operator("TopKV2")
def top_k(call: Call) -> tuple[Tensor, Tensor]:
    value, count = call.tensor(0), call.integer(1)
    # of equal values the first, which torch.topk does not promise
    best, places = torch.sort(value, dim=-1, descending=True, stable=True)
    kind = torch_dtype(call.attr("index_type", 3), f"node {call.node.name!r}")
    return best.narrow(-1, 0, count), places.narrow(-1, 0, count).to(kind)


@operator("Cumsum")
def cumsum(call: Call) -> Tensor:
    value = call.tensor(0)
    axis = axis_of(call.integer(1), value.dim(), call.node.name)
    value = value.flip(axis) if call.attr("reverse") else value
    total = torch.cumsum(value, axis, dtype=value.dtype)
    if call.attr("exclusive"):
        none = torch.zeros_like(value.narrow(axis, 0, 1))
        total = torch.cat([none, total.narrow(axis, 0, value.shape[axis] - 1)], axis)
    return total.flip(axis) if call.attr("reverse") else total


@operator("L2Loss")
def l2_loss(call: Call) -> Tensor:
    value = call.tensor(0)
    return (value * value).sum() / 2
