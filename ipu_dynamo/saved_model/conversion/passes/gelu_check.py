"""Compute nodes on random values, and compare them with the GELU that is to replace them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from ipu_dynamo.saved_model.conversion.drafts.draft import Draft
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup

_SIZE = 3  # of dimensions that calls choose
_OFF = 1e-6  # of the largest result, beside the rounding of constants in halves
_OFF_HALF = 2e-3
_HALVES = (torch.float16, torch.bfloat16)


def check_is_gelu(
    draft: Draft,
    chain: Sequence[NodeGroup],
    source: fx.Node,
    value: fx.Node,
    approximate: str,
    where: str,
) -> None:
    """Raise ValueError if nodes compute another function.

    Args:
        chain: the groups from `source` to `value`.
        where: begins the message.
    """
    members = {node for group in chain for node in group.nodes}
    shape = [_concrete(size) for size in source.meta["val"].shape]
    values: dict[fx.Node, Any] = {
        source: torch.randn(shape, generator=torch.Generator().manual_seed(0)).double() * 3
    }
    for node in draft.graph.nodes:
        if node in values:
            continue
        if node in draft.tensors:
            if members.isdisjoint(node.users):
                continue
            values[node] = _double(draft.tensors[node])
        elif node in members:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
            args, kwargs = map_aggregate((args, kwargs), _double)
            values[node] = node.target(*args, **kwargs)
        elif not isinstance(node.meta.get("val"), Tensor | tuple | list):
            values[node] = _concrete(node.meta.get("val"))
    expected = torch.nn.functional.gelu(values[source], approximate=approximate)
    if values[value].shape != expected.shape:
        raise ValueError(f"{where} has another shape than a GELU of its input")
    off = float((values[value] - expected).abs().max()) if expected.numel() else 0.0
    limit = _OFF_HALF if source.meta["val"].dtype in _HALVES else _OFF
    limit *= float(expected.abs().max()) if expected.numel() else 1.0
    if not off <= limit:
        raise ValueError(f"{where} is no GELU of its input: it is off by up to {off:.2g}")


def _double(value: Any) -> Any:
    """Floats in 64 bits, and types likewise: rounding is no matter here."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value


def _concrete(value: Any) -> Any:
    """A number in the place of a size that calls choose."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    expression = value.node.expr
    number = expression.subs(dict.fromkeys(expression.free_symbols, _SIZE))
    return int(number) if isinstance(value, torch.SymInt) else float(number)
