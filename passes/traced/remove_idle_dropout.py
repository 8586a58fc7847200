"""Remove dropout that drops nothing: in eval mode, or with a probability of 0.

Before   %y = aten.dropout(%x: f32[n], 0.5, False)
After    %y = %x
Keeps    what PyTorch does: it returns `x` itself. AOTAutograd would make a copy of it, and a change
         in place of the result would not reach `x`.
Source   `torch.nn.functional.dropout`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.kit import Pass

_DROPOUTS = (F.dropout, torch.dropout, aten.dropout.default)


class RemoveIdleDropout(Pass):
    """The pass, on a graph of Dynamo's or of ATen's operators and the graphs in it."""

    level = "traced"
    acts_on = _DROPOUTS

    def __call__(self, capture: Traced) -> bool:
        modules = [m for m in capture.graph.modules() if isinstance(m, fx.GraphModule)]
        idle = [node for module in modules for node in plan(module.graph)]
        for node in idle:
            node.replace_all_uses_with(_arguments(node)[0])
            node.graph.erase_node(node)
        if idle:
            for module in modules:
                module.recompile()
        return bool(idle)


def plan(graph: fx.Graph) -> list[fx.Node]:
    """The dropouts that drop nothing. Reads the graph only."""
    dropouts = [n for t in _DROPOUTS for n in graph.find_nodes(op="call_function", target=t)]
    return [node for node in dropouts if _is_idle(node)]


def _is_idle(node: fx.Node) -> bool:
    _, probability, training = _arguments(node)
    return training is False or (isinstance(probability, int | float) and probability == 0)


def _arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, probability, and whether elements are dropped; the defaults are `F.dropout`'s."""
    arguments: dict[str, Any] = dict(zip(("input", "p", "training"), node.args, strict=False))
    arguments |= {"training" if name == "train" else name: v for name, v in node.kwargs.items()}
    return arguments["input"], arguments.get("p", 0.5), arguments.get("training", True)
