"""Note every graph that reaches an engine, by a key of this folder's own.

It owes nothing to the checkout that made the graph, so that keys of two checkouts can be compared.
"""

import functools
import importlib
import inspect
import operator
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

_ENGINE_MODULES = ("ipu_dynamo.runtime.engines",)  # other layouts are added here
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_VIEWS_IN_PYTHON = ("getitem",)


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
        def record(engine: object, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return compile_(engine, *args, **kwargs)
            for text in map(graph_text, _graphs(*args, **kwargs)):  # before the engine changes it
                key = sha256(text.encode()).hexdigest()[:16]
                self.counts[key] += 1
                self.texts[key] = text
            self._inside = True
            try:
                return compile_(engine, *args, **kwargs)
            finally:
                self._inside = False

        return record


def graph_text(graph: fx.Graph) -> str:
    """Print a graph with layouts, one line per value, without names.

    The first line lists the inputs that it writes, by number. Inputs are numbered as they are first
    used: their order in the graph does not change its results.
    """
    inputs = _inputs_by_use(graph)
    nodes = [*inputs, *(node for node in graph.nodes if node.op != "placeholder")]
    number = {node: f"%{i}" for i, node in enumerate(nodes)}
    lines = [f"writes {_written(graph, inputs)}"]
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


def _written(graph: fx.Graph, inputs: Sequence[fx.Node]) -> list[int]:
    """Positions of the inputs that operators write, also through views."""
    root: dict[fx.Node, set[fx.Node]] = {}
    written: set[fx.Node] = set()
    for node in graph.nodes:
        root[node] = {node}
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            given = zip(target._schema.arguments, node.args, strict=False)
            named = ((a, node.kwargs.get(a.name)) for a in target._schema.arguments)
            for argument, value in (*given, *named):
                if argument.alias_info is None:
                    continue
                sources = set().union(*(root[n] for n in _nodes(value)))
                root[node] |= sources
                if argument.alias_info.is_write:
                    written |= sources
        elif getattr(target, "__name__", "") in _VIEWS_IN_PYTHON:
            root[node] |= set().union(*(root[n] for n in _nodes(node.args)))
    return [i for i, node in enumerate(inputs) if node in written]


def _nodes(value: object) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return iter(found)


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


def _graphs(*args: Any, **kwargs: Any) -> list[fx.Graph]:
    """The graphs that an engine is given: a list of what has one each, or one."""
    if args and isinstance(args[0], list | tuple):
        return [_graph([given, *args[1:], *kwargs.values()]) for given in args[0]]
    return [_graph([*args, *kwargs.values()])]


def _graph(arguments: Sequence[object]) -> fx.Graph:
    """The graph among an engine's arguments: of a module, or in an attribute of an argument."""
    for argument in arguments:
        for value in (argument, getattr(argument, "function", None)):
            graph = getattr(value, "graph", None)
            if isinstance(graph, fx.GraphModule):
                graph = graph.graph
            if isinstance(graph, fx.Graph):
                return graph
    kinds = ", ".join(type(a).__name__ for a in arguments)
    raise TypeError(f"no graph is found in what an engine was given: {kinds}; see {__name__}")


def _engine_classes() -> list[Any]:
    """Every class of an engine that compiles, wherever this checkout has them."""
    found = [
        member
        for module in _engine_modules()
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__
        and "compile" in vars(member)
        and not getattr(member, "_is_protocol", False)
    ]
    if not found:
        raise LookupError(f"no engine is found in {', '.join(_ENGINE_MODULES)}; see {__name__}")
    return found


def _engine_modules() -> Iterator[ModuleType]:
    for name in _ENGINE_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        yield module
        for inner in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
            yield importlib.import_module(inner.name)
