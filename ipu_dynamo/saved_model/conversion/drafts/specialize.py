"""Put numbers in the place of sizes, once the inputs' shapes are known.

Before   %n = aten.sym_size.int(%x, 0); %y = aten.reshape(%x, [%n, 8])
After    %y = aten.reshape(%x, [3, 8])
Keeps    operators on tensors, their order and names; sizes that data tell are computed as before.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
Sizes = Mapping[Any, int]


def sizes_of(values: Iterable[tuple[Tensor, Sequence[int]]]) -> dict[Any, int]:
    """The numbers of symbols, from described inputs and the shapes that they have.

    Args:
        values: fake tensors with symbols in their shapes, each with a real shape.
    """
    sizes: dict[Any, int] = {}
    for described, shape in values:
        for size, number in zip(described.shape, shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                sizes.setdefault(size.node.expr, int(number))
    return sizes


def specialize(graph: fx.Graph, sizes: Sizes) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph without sizes that follow from `sizes`.

    Returns:
        The copy, and its nodes by those of the graph.
    """
    copy = fx.Graph()
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            copy.output(map_arg(node.args[0], lambda n: values[n]))
            copy.output_node().meta = dict(node.meta)
        elif (number := _number(node, sizes)) is not None:
            values[node] = number
        elif node.op == "call_function" and _is_done(node, values):
            values[node] = None  # a check of sizes: they have been checked with the inputs
        else:
            values[node] = copy.node_copy(node, lambda n: values[n])
    copy.lint()
    return copy, {node: new for node, new in values.items() if isinstance(new, fx.Node)}


def _number(node: fx.Node, sizes: Sizes) -> int | float | bool | None:
    """The value of a node that is a size and follows from `sizes`."""
    value = node.meta.get("val")
    if node.op != "call_function":
        return None
    if isinstance(value, int | float | bool):
        return value
    if not isinstance(value, _SIZES):
        return None
    result = value.node.expr.subs(sizes)
    if result.free_symbols:
        return None
    if isinstance(value, torch.SymBool):
        return bool(result)
    return int(result) if isinstance(value, torch.SymInt) else float(result)


def _is_done(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    return node.meta.get("val") is None and not any(
        isinstance(values[source], fx.Node) for source in node.all_input_nodes
    )
