"""Cut the part of a graph that computes one value, and write it as Python."""

import math
import re
from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from ipu_dynamo.ops.graph_queries import needed_for
from ipu_dynamo.passes.graph.extract import subgraph

_HEADER = {"device": "from torch import device", "inf": "inf = math.inf", "nan": "nan = math.nan"}


def cut(
    target: fx.Node | tuple[fx.Node, ...],
    stops: Collection[fx.Node],
    named: Callable[[fx.Node], str],
    *,
    whole: bool = False,
) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph that computes `target` from the values of `stops`, and those it needs, in order.

    Args:
        named: gives the name of a node in the new graph.
        whole: start at the placeholders, with all operators before `target`.
    """
    targets = target if isinstance(target, tuple) else (target,)
    original = targets[0].graph
    needed = set(original.nodes)
    if not whole:
        needed = needed_for(targets, lambda node: node not in stops or node in targets)
    last = max(list(original.nodes).index(node) for node in targets)
    inside = [node for node in list(original.nodes)[: last + 1] if node in needed]
    stopping = set() if whole else set(stops).difference(targets)
    inputs = [n for n in inside if n.op in ("placeholder", "get_attr") or n in stopping]
    taken = set(inputs)
    graph, copies = subgraph([n for n in inside if n not in taken], inputs, named)
    results = tuple(copies[node] for node in targets)
    graph.output(results if isinstance(target, tuple) else results[0])
    return graph, inputs


def python(graph: fx.Graph, name: str) -> tuple[str, list[str]]:
    """A graph as a function `name`, and the lines that have to stand before it."""
    code = graph.python_code(root_module="self")
    source = code.src.replace("def forward(self, ", f"def {name}(")
    source = source.replace("def forward(self)", f"def {name}()")
    source = re.sub(r";  (\w+ = )+None( *#.*)?$", "", source, flags=re.M)
    lines = []
    for word, value in code.globals.items():
        if re.search(rf"(?<![\w.]){word}\b", source) and word != "torch":
            lines.append(_HEADER.get(word) or _imported(word, value))
    if "torch.ops.ipu." in source:
        lines.append("import ipu_dynamo.ops.marks.markers")
    return source.strip() + "\n", lines


def _imported(word: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{word} = {'nan' if math.isnan(value) else repr(value)}"
    return f"from {value.__module__} import {value.__qualname__} as {word}"
