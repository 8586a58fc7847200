"""Count every graph that reaches an engine, by a key of this folder's own.

A key depends on no code of the checkout that made the graph, so that two checkouts' keys compare.
"""

import functools
import importlib
import inspect
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, fx

_ENGINES = "ipu_dynamo.runtime.engines.engines"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Recorder:
    """Counts graphs by their keys, and keeps the text of each.

    A graph that one engine hands on to another is counted once.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.texts: dict[str, str] = {}
        self._inside = False
        for engine in _engine_classes():
            engine.compile = self._recording(engine.compile)

    def clear(self) -> None:
        """Forget the counts; texts stay."""
        self.counts.clear()

    def _recording(self, compile_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compile_)
        def record(engine: object, recipes: Sequence[Any]) -> Any:
            if self._inside:
                return compile_(engine, recipes)
            for recipe in recipes:
                text = graph_text(recipe.function.graph.graph)  # before the engine changes it
                key = sha256(text.encode()).hexdigest()[:16]
                self.counts[key] += 1
                self.texts[key] = text
            self._inside = True
            try:
                return compile_(engine, recipes)
            finally:
                self._inside = False

        return record


def graph_text(graph: fx.Graph) -> str:
    """Print a graph with layouts, one line per value, without names.

    Inputs are numbered as they are first used: their order does not change a graph's results.
    """
    inputs = _inputs_by_use(graph)
    nodes = [*inputs, *(node for node in graph.nodes if node.op != "placeholder")]
    number = {node: f"%{i}" for i, node in enumerate(nodes)}
    lines = []
    for node in nodes:
        given = () if node.op == "placeholder" else (node.args, sorted(node.kwargs.items()))
        arguments = _ADDRESS.sub("", repr(fx.node.map_arg(given, number.__getitem__)))
        value = _value(node.meta.get("val")) if node.op != "output" else ""
        lines.append(f"{number[node]}{value} = {_operator(node)}{arguments}")
    return "\n".join(lines) + "\n"


def _inputs_by_use(graph: fx.Graph) -> list[fx.Node]:
    """The inputs, in the order of their first use; then those that nothing uses."""
    uses = dict.fromkeys(source for node in graph.nodes for source in node.all_input_nodes)
    every = dict.fromkeys([*uses, *graph.nodes])
    return [node for node in every if node.op == "placeholder"]


def _operator(node: fx.Node) -> str:
    target = node.target
    if node.op == "get_attr":
        return f"get_attr {_attribute(node)}"
    if node.op in ("placeholder", "output"):
        return node.op
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator | str):
        return str(target)
    return getattr(target, "__qualname__", None) or repr(target)


def _attribute(node: fx.Node) -> str:
    """The value of an attribute: a tensor, or an inner graph as its text."""
    value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    if isinstance(value, fx.GraphModule):
        return graph_text(value.graph)
    if isinstance(value, Tensor):
        return f"{_value(value)}{value.detach().cpu().tolist()}"
    return _ADDRESS.sub("", repr(value))


def _value(value: object) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f": {dtype}{list(value.shape)} strides {list(value.stride())} {value.device}"
    if isinstance(value, list | tuple):
        return f": ({', '.join(_value(v).removeprefix(': ') for v in value)})"
    return "" if value is None else f": {type(value).__name__} {value}"


def _engine_classes() -> list[Any]:
    """Every class of an engine in this checkout."""
    module = importlib.import_module(_ENGINES)
    classes = (member for member in vars(module).values() if inspect.isclass(member))
    engines = [c for c in classes if "compile" in vars(c) and not getattr(c, "_is_protocol", False)]
    if not engines:
        raise LookupError(f"no engine is found in {_ENGINES}; see {__name__}")
    return engines
