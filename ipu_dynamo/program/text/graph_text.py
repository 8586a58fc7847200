"""Write the graph of a function as text, one node a line, and read it back.

    %x: f32[2,4] = placeholder
    %t: f32[4,8]{1,4} = aten.t.default(%w)  # "model.py:12 in forward: return x @ self.w"
    return (%t,)

Types, strides and devices of results are written down: to derive them again would run every
operator's shape function, and give what this PyTorch says instead of what the program was made for.
FX makes Python code from a graph. What can enter it from text is checked here: names of nodes,
operators that are registered with arguments that they have, and plain values.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.errors import source_line
from ipu_dynamo.ops.operators import check_arguments, operator_name, operator_named
from ipu_dynamo.ops.private.graphs import FakeTensorMode, module_of, with_device
from ipu_dynamo.program.ir.layout import Layout, device_named
from ipu_dynamo.program.text.indented import Line, in_line
from ipu_dynamo.program.text.literals import write
from ipu_dynamo.program.text.reader import Reader, Record

RECOMPUTED = "ipu.recomputed"  # key of a node's meta: the backward pass computes this again
GROUP = "ipu.group"  # key of a convolution's meta: its place in a group, as in "parallel 1/2"
OWN_MEMORY = "ipu.own_memory"  # key of a clone's meta: without it a result would share memory
# what stays of a node's meta, besides its value and its source line
_KEPT = (RECOMPUTED, GROUP, OWN_MEMORY)
_OPS = ("placeholder", "call_function", "output")
_PLACE = re.compile(r"(parallel|serial) [1-9]\d*/[1-9]\d*")
_SOURCE = re.compile(r"(.+?):(\d+) in (\S+): (.+)")
Text = Callable[[Any], str]


def write_graph(module: fx.GraphModule) -> list[str]:
    """The nodes of a flat graph.

    Raises:
        ValueError: a node has something that cannot be written.
    """
    lines = []
    for node in module.graph.nodes:
        try:
            if node.op not in _OPS or (node.op != "output" and "val" not in node.meta):
                raise ValueError(f"{node.op} {node.target} cannot be written")
            text = node_text(node, write, operator_name)
        except ValueError as error:
            raise ValueError(f"%{node.name}: {error}\n  from: {source_line(node)}") from error
        source = source_line(node)
        comment = f"  # {write(source)}" if _SOURCE.fullmatch(source) else ""
        lines.append(text if node.op == "output" else f"%{node.name}: {text}{comment}")
    return lines


def node_text(node: fx.Node, text: Text, called: Text) -> str:
    """Everything that decides what a node computes; its name and its source line do not.

    Args:
        text: writes values, in which other nodes are.
        called: writes operators.
    """
    if node.op == "output":
        return f"return {text(node.args[0])}"
    kept = {key: node.meta[key] for key in _KEPT if key in node.meta}
    marks = f"  {text(kept)}" if kept else ""
    result = text(_described(node.meta.get("val")))
    if node.op == "placeholder":
        return f"{result} = placeholder{marks}"
    target = called(node.target) if node.op == "call_function" else f"{node.op} {node.target}"
    args = [text(arg) for arg in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
    return f"{result} = {target}({', '.join(args)}){marks}"


def read_graph(lines: Sequence[Line]) -> fx.GraphModule:
    """Inverse of `write_graph`; the values of the nodes are fake tensors.

    Raises:
        ValueError: the lines are not a graph.
    """
    graph, mode, named = fx.Graph(), FakeTensorMode(), cache(operator_named)
    nodes: dict[str, fx.Node] = {}
    for line in lines:
        with in_line(line):
            reader = Reader(line.text, nodes)
            if line.below:
                raise ValueError("nothing may stand below a node")
            if line is lines[-1]:
                _read_output(reader, graph)
            else:
                node = _read_node(reader, graph, mode, named)
                nodes[node.name] = node
            reader.end()
    if not lines:
        raise ValueError("its graph is empty")
    return module_of(graph)


def _read_output(reader: Reader, graph: fx.Graph) -> None:
    """Append the node that returns."""
    reader.take("return")
    returned = reader.value()
    if not isinstance(returned, tuple) or not all(map(_is_result, returned)):
        raise ValueError("a function returns a tuple of tensors and None")
    graph.output(returned).meta["val"] = None


def _read_node(
    reader: Reader, graph: fx.Graph, mode: FakeTensorMode, named: Callable[[str], Any]
) -> fx.Node:
    """Append the node that a line describes."""
    name = reader.take("node").removeprefix("%")
    reader.take(":")
    value = _faked(reader.value(), mode)
    reader.take("=")
    target = reader.take("name")
    if target == "placeholder":
        if not isinstance(value, Tensor):
            raise ValueError("a placeholder is a tensor")
        node = graph.create_node("placeholder", name, name=name)
    else:
        args, kwargs = reader.arguments()
        function = named(target)
        check_arguments(function, args, kwargs)
        _check_plain((args, kwargs))
        node = graph.create_node("call_function", function, args, kwargs, name)
    if node.name != name or name == "self":
        raise ValueError(f"%{name} is not free as a name")
    node.meta["val"] = value
    node.meta |= _read_marks(reader)
    if reader.skip("#"):
        node.meta["stack_trace"] = _stack_trace(reader.string())
    return node


def _read_marks(reader: Reader) -> dict[str, Any]:
    marks: dict[str, Any] = reader.value() if reader.sees("{") else {}
    if not all(_is_mark(key, value) for key, value in marks.items()):
        raise ValueError(f"a node may be marked as {', '.join(_KEPT)}")
    return marks


def _is_mark(key: str, value: object) -> bool:
    if key == GROUP:
        return isinstance(value, str) and _PLACE.fullmatch(value) is not None
    return key in _KEPT and value is True


def _described(value: object) -> object:
    """What is written of a node's value: layouts in place of tensors."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return Layout.of(value)
    if isinstance(value, list | tuple):
        parts = [_described(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _faked(value: object, mode: FakeTensorMode) -> object:
    """Inverse of `_described`."""
    if isinstance(value, Layout):
        return with_device(mode, value.empty("meta"), device_named(value.device))
    if isinstance(value, list | tuple):
        return type(value)(_faked(part, mode) for part in value)
    if value is None or isinstance(value, int | float):
        return value
    raise ValueError(f"no operator results in {write(value)}")


def _is_result(value: object) -> bool:
    """Whether a function may return it: a node whose value is a tensor or None, or None."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    return value is None or isinstance(value, Tensor)


def _check_plain(value: object) -> None:
    """Raise ValueError for what is no argument of an operator."""
    match value:
        case list() | tuple():
            for part in value:
                _check_plain(part)
        case Record() | Layout():
            raise ValueError("an operator takes no dataclass")
        case dict():
            _check_plain([*value.values()])
        case slice():
            _check_plain([value.start, value.stop, value.step])


def _stack_trace(source: str) -> str:
    """A stack trace of which `source_line` gives `source`."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise ValueError(f"not a source line: {source!r}")
    file, line, function, text = match.groups()
    return f'  File "{file}", line {line}, in {function}\n    {text}\n'
