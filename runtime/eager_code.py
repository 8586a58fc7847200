"""Write a graph as Python that calls each operator directly.

The code that FX writes finds an operator by four attributes and goes through a Python function of
its own. For a small operator that takes as long as its arithmetic.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

aten = torch.ops.aten
_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def eager_code(graph: fx.Graph) -> Callable[[list[Tensor]], Sequence[Tensor | None]]:
    """A function on the list of the graph's inputs; a value ends after its last use, as with FX."""
    written = _with_linear(graph).python_code("self")
    names = dict(written.globals)

    def name(match: re.Match[str]) -> str:
        namespace, operator, overload = match.groups()
        packet = getattr(getattr(torch.ops, namespace), operator)
        short = f"{namespace}_{operator}_{overload}"
        names[short] = getattr(packet, overload)._op
        return f"{short}("

    source = _OPERATOR.sub(name, written.src)
    exec(compile(source, "<stage>", "exec"), names)
    forward: Any = names["forward"]
    return lambda arguments: forward(None, *arguments)


def _with_linear(graph: fx.Graph) -> fx.Graph:
    """A copy of `graph` in which a layer's product is one call, as it is in the model.

    AOTAutograd writes `linear(x, w, b)` as `addmm(b, x, t(w))`, and `linear` does the same inside.
    """
    copied = fx.Graph()
    of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if layer := _layer(node):
            of[node] = copied.call_function(F.linear, tuple(of[argument] for argument in layer))
        else:
            of[node] = copied.node_copy(node, of.__getitem__)
    for node in copied.find_nodes(op="call_function", target=aten.t.default):
        if not node.users:
            copied.erase_node(node)
    return copied


def _layer(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Input, weight and bias, if `node` is the product of a layer."""
    if node.target is not aten.addmm.default or node.kwargs:
        return None
    bias, x, transposed = node.args
    assert isinstance(bias, fx.Node)
    assert isinstance(x, fx.Node)
    assert isinstance(transposed, fx.Node)
    weight = transposed.args[0] if transposed.target is aten.t.default else None
    if not isinstance(weight, fx.Node):
        return None
    return (x, weight, bias) if bias.meta["val"].shape == weight.meta["val"].shape[:1] else None
