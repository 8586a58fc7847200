"""Recognise graphs that Inductor compiles wrongly, so that another engine runs them.

PyTorch 2.13.0 writes the result of `x.index_add(dim, index, f(x))` over x while f(x) is still read
from it; plain torch.compile computes the same wrong numbers.
"""

import torch
from torch import fx

from ipu_dynamo.ops.graph_queries import is_view_operator, only_looks
from ipu_dynamo.ops.private.graphs import OpOverload

aten = torch.ops.aten
_SCATTERS: dict[object, int] = {  # operator -> position of the values that it writes
    aten.index_add.default: 3,
    aten.index_copy.default: 3,
    aten.index_put.default: 2,
    aten.index_reduce.default: 3,
    aten.scatter.src: 3,
    aten.scatter_add.default: 3,
    aten.scatter_reduce.two: 3,
}
_READ_IN_PLACE = {aten.gather.default, aten.index.Tensor, aten.index_select.default}


def miscompiled(graph: fx.Graph) -> fx.Node | None:
    """The first operator that would read what it has already overwritten, or None."""
    nodes: list[fx.Node] = list(graph.nodes)
    for node in nodes:
        place = _SCATTERS.get(node.target)
        if place is not None and len(node.args) > place:
            written, values = node.args[0], node.args[place]
            if isinstance(values, fx.Node) and _base(written) in _read_by(values):
                return node
    return None


def _read_by(values: fx.Node) -> set[object]:
    """Nodes that are read element by element where `values` is needed."""
    found: set[fx.Node] = set()
    waiting = [values]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        target = node.target
        inlined = only_looks(node) or (
            isinstance(target, OpOverload)
            and (torch.Tag.pointwise in target.tags or target in _READ_IN_PLACE)
        )
        if inlined:
            waiting += node.all_input_nodes
    return {_base(node) for node in found}


def _base(node: object) -> object:
    """The tensor that a view looks at."""
    while isinstance(node, fx.Node) and is_view_operator(node.target):
        node = node.args[0]
    return node
