"""Draw random numbers once where backward repeats forward, and keep them for the backward pass.

It repeats a checkpoint, and all that `activation_memory_budget` leaves no memory for.

Before   %d = aten.native_dropout(%x: f32[n], 0.5, True)
         %y = %d[0]
         %d, %y  with meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
After    %d = aten.native_dropout(%x, 0.5, True)
         %m = %d[1]
         %n = aten._to_copy(%m, dtype=torch.float32)
         %f = aten.mul(%n, 2.0)
         %y = aten.mul(%x, %f)
         %d, %m      with meta["recompute"] = CheckpointPolicy.MUST_SAVE
         %n, %f, %y  with meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
Keeps    the bits of results and gradients, shapes, dtypes, source lines.
Source   `torch.utils.checkpoint`. PyTorch draws again from the generator's saved state, with
         operators that hold another operator.
"""

from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ipu_dynamo.capture.capture import BACKWARD
from ipu_dynamo.capture.private.aot import budget_of_memory
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import may_draw
from ipu_dynamo.ops.private.node_meta import POLICY
from ipu_dynamo.passes.kit import GraphPass

AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class KeepDraws(GraphPass):
    """The pass, on a joint graph that is to be cut in two."""

    level = "joint"
    needed = "the backward pass would draw other numbers"

    def plan(self, graph: fx.Graph) -> list[fx.Node]:
        """Find the draws that backward would repeat. Reads the graph only."""
        any_of_them = budget_of_memory(graph)
        return [
            node
            for node in graph.nodes
            if may_draw(node)
            and (policy := node.meta.get(POLICY)) != CheckpointPolicy.MUST_SAVE
            and (policy in AGAIN or (any_of_them and not node.meta.get(BACKWARD)))
        ]

    def apply(self, graph: fx.Graph, node: fx.Node) -> None:
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
    like, drawn = dropout.meta["val"]
    with dropout.graph.inserting_after(dropout):
        mask = _call(dropout, drawn, getitem, dropout, 1)
    with dropout.graph.inserting_after(mask):
        numbers = _call(dropout, like, aten._to_copy.default, mask, dtype=like.dtype)
    with dropout.graph.inserting_after(numbers):
        factors = _call(dropout, like, aten.mul.Tensor, numbers, scale)
    with dropout.graph.inserting_after(factors):
        result = _call(dropout, like, aten.mul.Tensor, x, factors)
    for part in _parts(dropout):
        if part is not mask:
            part.replace_all_uses_with(mask if part.args[1] else result)
            dropout.graph.erase_node(part)


def _call(origin: fx.Node, value: torch.Tensor, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = origin.graph.call_function(target, args, kwargs)
    node.meta = origin.meta | {"val": value}
    return node
