"""Insert operators into a graph with the metadata that passes rely on."""

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import BACKWARD, STAGE
from ipu_dynamo.capture.torch_private import fake_mode_of

_INHERITED = (STAGE, BACKWARD, "stack_trace")


def call(graph: fx.Graph, target: Any, *args: Any, origin: fx.Node, **kwargs: Any) -> fx.Node:
    """Insert a call at the graph's insertion point, placed and blamed where `origin` is."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: origin.meta[key] for key in _INHERITED if key in origin.meta}
    node.meta["val"] = evaluate(node, origin)
    return node


def evaluate(node: fx.Node, origin: fx.Node | None = None) -> Any:
    """The fake value of a call, from the fake values of its arguments, or in `origin`'s mode."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    known = [source.meta["val"] for source in node.all_input_nodes]
    known += [origin.meta["val"]] if origin is not None else []
    with fake_mode_of(known), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]
