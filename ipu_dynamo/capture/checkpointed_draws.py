"""Draw random numbers inside a checkpoint once, and keep them for the backward pass.

Before   %d = aten.native_dropout(%x, p, True)              to be computed again in backward
         %y = %d[0]
After    %d = aten.native_dropout(%x, p, True);  %m = %d[1]  kept
         %y = %x * (%m * 1 / (1 - p))                       to be computed again in backward
Keeps    the bits of results and gradients, shapes, dtypes, source lines.

PyTorch draws again from the generator's saved state, with operators that hold another operator.
"""

from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
POLICY = "recompute"  # meta key where partitioners look for a policy; checked on PyTorch 2.13.0
AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def keep_draws(graph: fx.Graph) -> None:
    """Rewrite a joint graph that AOTAutograd is about to cut in two."""
    for node in list(graph.nodes):
        tags = getattr(node.target, "tags", ())
        if node.meta.get(POLICY) in AGAIN and torch.Tag.nondeterministic_seeded in tags:
            if node.target is aten.native_dropout.default:
                _apply_mask(node)
            for value in (node, *_parts(node)):
                value.meta[POLICY] = CheckpointPolicy.MUST_SAVE


def _parts(node: fx.Node) -> list[fx.Node]:
    """The results of an operator that has several."""
    return [user for user in node.users if user.target is getitem]


def _apply_mask(dropout: fx.Node) -> None:
    """Compute the first result from the second."""
    x, p, *_ = dropout.args
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)  # type: ignore[operator]
    given, drawn = dropout.meta["val"]
    with dropout.graph.inserting_after(dropout):
        mask = _call(dropout, drawn, getitem, dropout, 1)
    with dropout.graph.inserting_after(mask):
        numbers = _call(dropout, given, aten._to_copy.default, mask, dtype=given.dtype)
    with dropout.graph.inserting_after(numbers):
        factors = _call(dropout, given, aten.mul.Tensor, numbers, scale)
    with dropout.graph.inserting_after(factors):
        result = _call(dropout, given, aten.mul.Tensor, x, factors)
    for part in _parts(dropout):
        if part is not mask:
            part.replace_all_uses_with(mask if part.args[1] else result)
            dropout.graph.erase_node(part)


def _call(origin: fx.Node, value: torch.Tensor, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = origin.graph.call_function(target, args, kwargs)
    node.meta = origin.meta | {"val": value}
    return node
