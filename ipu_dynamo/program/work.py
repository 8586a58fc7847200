"""Estimate how long operators take on one core, to decide what is worth a call or a thread."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

# Round figures for one core of a server processor; decisions need no more than their size.
_FLOPS_PER_SECOND = 5e10
_BYTES_PER_SECOND = 5e9


def estimated_seconds(operators: Iterable[fx.Node]) -> float:
    """Arithmetic of products and convolutions, plus a pass over every operator's result."""
    total = 0.0
    for node in operators:
        total += _flops(node) / _FLOPS_PER_SECOND + _nbytes(node) / _BYTES_PER_SECOND
    return total


def _flops(node: fx.Node) -> float:
    target: Any = node.target
    count = flop_registry.get(getattr(target, "overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return float(count(*args, **kwargs, out_val=node.meta["val"]))


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    views = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
    if views or not isinstance(value, Tensor):
        return 0
    return value.numel() * value.element_size()
