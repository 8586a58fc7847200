"""Describe arguments and values of nodes, so that equal descriptions mean equal operators."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, fx

Address = Callable[[fx.Node], Hashable]
_PLAIN = (
    bool,
    int,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def described(value: Any, address: Address) -> Hashable:
    """Return a key of an argument, with `address` of its nodes; an unknown kind equals nothing."""
    if isinstance(value, fx.Node):
        return "node", address(value)
    if isinstance(value, list | tuple):
        return tuple(described(item, address) for item in value)
    if isinstance(value, dict):
        return tuple((key, described(item, address)) for key, item in value.items())
    if type(value) in (float, complex):
        return type(value), repr(value)  # 0.0 differs from -0.0, and NaN equals NaN
    return (type(value), value) if type(value) in _PLAIN else object()


def layout(value: Any) -> Hashable:
    """Return a key of the layout of a fake value; a value without strides equals nothing."""
    if isinstance(value, list | tuple):
        return tuple(map(layout, value))
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return object()
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if any(type(number) is not int for number in numbers):
        return object()
    return numbers, len(value.shape), value.dtype, value.device


def call(node: fx.Node, address: Address) -> Hashable:
    """Return a key of a node's computation and of its result's layout."""
    arguments = described(node.args, address), described(node.kwargs, address)
    return node.op, node.target, arguments, layout(node.meta.get("val"))
