"""Tell views of tensors from new tensors, for passes that move values between functions."""

import operator
from typing import Any

import torch
from torch import fx


def is_view(node: fx.Node) -> bool:
    """Whether `node` only looks at the memory of its first argument."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target.is_view)


def root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` looks at: itself, unless it is a view."""
    while is_view(node):
        (node,) = node.all_input_nodes[:1]
    return node


def makes_constant(node: fx.Node) -> bool:
    """Whether `node` computes the same small tensor every time, from no tensor at all."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.all_input_nodes
        and not node.is_impure()
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def numel(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0
