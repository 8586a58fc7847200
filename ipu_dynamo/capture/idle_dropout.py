"""Remove dropout that drops nothing: in eval mode, or with a probability of 0.

Before   %y = dropout(%x, 0.5, training=False)
After    %x in its place
Keeps    what PyTorch does: it returns `x` itself. AOTAutograd would make a copy of it, and a change
         in place of the result would not reach `x`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

aten = torch.ops.aten
_DROPOUTS = (F.dropout, torch.dropout, aten.dropout.default)


def remove_idle_dropout(gm: fx.GraphModule) -> None:
    """Rewrite a graph of Dynamo's or of ATen's operators, and the graphs in it."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for target in _DROPOUTS:
                for node in module.graph.find_nodes(op="call_function", target=target):
                    _remove_if_idle(node)
            module.recompile()


def _remove_if_idle(node: fx.Node) -> None:
    source, probability, training = _arguments(node)
    if training is False or (isinstance(probability, int | float) and probability == 0):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def _arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, probability, and whether elements are dropped; the defaults are `F.dropout`'s."""
    given: dict[str, Any] = dict(zip(("input", "p", "training"), node.args, strict=False))
    given |= {"training" if name == "train" else name: v for name, v in node.kwargs.items()}
    return given["input"], given.get("p", 0.5), given.get("training", True)
