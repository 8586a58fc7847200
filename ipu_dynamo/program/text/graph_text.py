"""Write the graph of a function as text, one node a line, and read it back.

    %x: f32[2,4] = placeholder
    %t: f32[4,8]{1,4} = aten.t.default(%w)  # "model.py:12 in forward: return x @ self.w"
    return (%t,)

Types, strides and devices of results are written down. To derive them again would run every
operator's shape function, and another PyTorch could give other ones than the program was made for.
FX makes Python code from a graph. So this file checks all text that can enter the code: names of
nodes, registered operators and their arguments, and plain values.

Passes see graphs that are not functions yet. A `GraphForm` describes the text of such graphs.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.errors import module_trace, source_line
from ipu_dynamo.ops.operators import check_arguments, operator_name, operator_named
from ipu_dynamo.ops.private.graphs import (
    MODE_SWITCHES,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverloadPacket,
    erased_names,
    module_of,
    reserve_names,
    with_device,
)
from ipu_dynamo.ops.private.node_meta import EXAMPLE_VALUE
from ipu_dynamo.program.ir.layout import Layout, device_named
from ipu_dynamo.program.machine_marks import MACHINE, MachineMark
from ipu_dynamo.program.text.indented import Line, in_line
from ipu_dynamo.program.text.literals import write
from ipu_dynamo.program.text.reader import Pairs, Reader, Record

RECOMPUTED = "ipu.recomputed"  # key of a node's meta: the backward pass computes this again
GROUP = "ipu.group"  # key of a convolution's meta: its place in a group, as in "parallel 1/2"
OWN_MEMORY = "ipu.own_memory"  # key of a clone's meta: without it a result would share memory
SERIAL_STEP = "ipu.serial_step"  # key of a product's meta: its part of a product, as in "2/16"
MEMORY = "ipu.memory"  # key of an operator's meta: its share of an IPU's memory, from 0 to 1
DIRECTION = "ipu.direction"  # key of a node's meta: "backward", or none in the forward pass
# keys of a node's meta that are written, in addition to its value and its source line
_KEPT = (RECOMPUTED, GROUP, OWN_MEMORY, MACHINE, SERIAL_STEP, MEMORY, DIRECTION)
_OPS = ("placeholder", "call_function", "output")
_PLACE = re.compile(r"(parallel|serial) [1-9]\d*/[1-9]\d*")
_STEP = re.compile(r"[1-9]\d*/[1-9]\d*", re.ASCII)
_SOURCE = re.compile(r"(.+?):(\d+) in (\S+): (.+)")
_MODULE = re.compile(r'(?:([^":\n]+): )?(\w+)')  # of the module that calls an operator
Text = Callable[[Any], str]
Marks = dict[str, Any]


def _kept(node: fx.Node) -> Marks:
    return {key: node.meta[key] for key in _KEPT if key in node.meta}


def _known(marks: Marks) -> Marks:
    if not all(_is_mark(key, value) for key, value in marks.items()):
        raise ValueError(f"a node may be marked as {', '.join(_KEPT)}")
    return marks


def _is_mark(key: str, value: object) -> bool:
    if key == GROUP:
        return isinstance(value, str) and _PLACE.fullmatch(value) is not None
    if key == SERIAL_STEP:
        return isinstance(value, str) and _STEP.fullmatch(value) is not None
    if key == MEMORY:
        return isinstance(value, float) and 0 <= value <= 1
    if key == MACHINE:
        return isinstance(value, str) and bool(MachineMark.parse(value))
    if key == DIRECTION:
        return value == "backward"
    return key in _KEPT and value is True


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


@dataclass(frozen=True)
class GraphForm:
    """The form in which graphs are written and read.

    Args:
        marks: the entries of a node's meta that are written.
        meta: the inverse of `marks`; raises ValueError for an impossible mark.
        arguments: the arguments of a node that are written.
        of_functions: an unreadable value raises ValueError when it is written. Otherwise Python
            objects print as their names, and tensors may be attributes. The names of erased nodes
            are written, too, because the graph gives them to no new node.
        mode: of the fake tensors that are read; None: a new one for each graph.
        attributes: the tensors that nodes read, by their names.
    """

    marks: Callable[[fx.Node], Marks] = _kept
    meta: Callable[[Marks], Marks] = _known
    arguments: Callable[[fx.Node], tuple[Any, ...]] = _arguments
    of_functions: bool = True
    mode: FakeTensorMode | None = None
    attributes: Mapping[str, Tensor] = field(default_factory=dict)


FUNCTION = GraphForm()


def write_graph(module: fx.GraphModule, form: GraphForm = FUNCTION) -> list[str]:
    """The nodes of a flat graph.

    Raises:
        ValueError: a node of a function has something that cannot be written.
    """
    if not form.of_functions:
        return list(_any_lines(module.graph, form))
    lines = []
    for node in module.graph.nodes:
        try:
            if node.op not in _OPS or (node.op != "output" and "val" not in node.meta):
                raise ValueError(f"{node.op} {node.target} cannot be written")
            text = node_text(node, write, operator_name, form)
        except ValueError as error:
            raise ValueError(f"%{node.name}: {error}\n  from: {source_line(node)}") from error
        lines.append(_line(node, text))
    return lines


def _any_lines(graph: fx.Graph, form: GraphForm) -> Iterator[str]:
    """The nodes of a graph that need not be a function's, after the names that are taken."""
    names, counts = erased_names(graph)
    if names or counts:
        yield f"erased {write(names)}" + (f"  {write(counts)}" if counts else "")
    text = partial(write, otherwise=opaque)
    for node in graph.nodes:
        yield _line(node, node_text(node, text, _called, form))


def _line(node: fx.Node, text: str) -> str:
    source = source_line(node)
    comment = f"  # {write(source)}" if _is_known(source) else ""
    return text if node.op == "output" else f"%{node.name}: {text}{comment}"


def _called(target: object) -> str:
    """The name of an operator, or of another function, which is not found by it."""
    for name, switch in MODE_SWITCHES.items():
        if target is switch:
            return name
    try:
        return operator_name(target)
    except ValueError:
        if isinstance(target, OpOverloadPacket | HigherOrderOperator):
            return str(target)
        name = getattr(target, "__qualname__", getattr(target, "__name__", str(target)))
        module = getattr(target, "__module__", None) or "opaque"
        return re.sub(r"[^\w.]", "", f"{module}.{name}", flags=re.ASCII)


def opaque(value: object) -> str:
    """A Python object by its name, its class, or as a symbol prints."""
    if isinstance(value, Tensor):
        name = f"{value.dtype}{[*value.shape]}"
    elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        name = str(value)
    else:
        name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"opaque({write(name)})"


def node_text(node: fx.Node, text: Text, called: Text, form: GraphForm = FUNCTION) -> str:
    """Everything that decides the values of a node; its name and its source line do not.

    Args:
        text: writes values, in which other nodes are.
        called: writes operators.
    """
    kept = form.marks(node)
    marks = f"  {text(kept)}" if kept else ""
    if node.op == "output":
        return f"return {text(node.args[0])}{marks}"
    result = text(_described(node.meta.get("val", node.meta.get(EXAMPLE_VALUE))))
    if node.op == "placeholder":
        return f"{result} = placeholder{marks}"
    target = called(node.target) if node.op == "call_function" else f"{node.op} {node.target}"
    arguments = form.arguments(node)
    args = [text(arg) for arg in arguments] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
    return f"{result} = {target}({', '.join(args)}){marks}"


def read_graph(lines: Sequence[Line], form: GraphForm = FUNCTION) -> fx.GraphModule:
    """Inverse of `write_graph`; the values of the nodes are fake tensors.

    Raises:
        ValueError: the lines are not a graph.
    """
    graph, mode, named = fx.Graph(), form.mode or FakeTensorMode(), cache(operator_named)
    nodes: dict[str, fx.Node] = {}
    erased: tuple[tuple[str, ...], dict[str, int]] = ((), {})
    for line in lines:
        with in_line(line):
            reader = Reader(line.text, nodes)
            if line.below:
                raise ValueError("nothing may stand below a node")
            if line is lines[-1]:
                _read_output(reader, graph, form)
            elif line is lines[0] and not form.of_functions and reader.skip("erased"):
                erased = _read_erased(reader)
            else:
                node = _read_node(reader, graph, form, mode, named)
                nodes[node.name] = node
            reader.end()
    if not lines:
        raise ValueError("its graph is empty")
    reserve_names(graph, *erased)
    return module_of(graph, _holding(form.attributes))


def _holding(attributes: Mapping[str, Tensor]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in attributes.items():
        setattr(module, name, tensor)
    return module


def _read_erased(reader: Reader) -> tuple[tuple[str, ...], dict[str, int]]:
    """The names that are taken, and how far those of a kind were counted."""
    names, counts = reader.value(), _by_name(reader) if reader.sees("{") else {}
    if not isinstance(names, tuple) or not all(type(name) is str for name in names):
        raise ValueError("names are a tuple of strings")
    if not all(type(count) is int for count in counts.values()):
        raise ValueError("counts are whole numbers")
    return names, counts


def _read_output(reader: Reader, graph: fx.Graph, form: GraphForm) -> None:
    """Append the node that returns."""
    reader.take("return")
    returned = reader.value()
    kinds = tuple if form.of_functions else (tuple, list)
    if not isinstance(returned, kinds) or not all(
        _is_result(value) or (type(value) is int and not form.of_functions) for value in returned
    ):
        raise ValueError("a function returns a tuple of tensors and None")
    node = graph.output(returned)
    node.meta["val"] = None
    if not form.of_functions:
        node.meta |= _read_marks(reader, form)


def _read_node(
    reader: Reader,
    graph: fx.Graph,
    form: GraphForm,
    mode: FakeTensorMode,
    named: Callable[[str], Any],
) -> fx.Node:
    """Append the node that a line describes."""
    name = reader.take("node").removeprefix("%")
    reader.take(":")
    value = _faked(reader.value(), mode)
    reader.take("=")
    target = reader.take("name")
    if target == "placeholder":
        if not isinstance(value, Tensor) and form.of_functions:
            raise ValueError("a placeholder is a tensor")
        node = graph.create_node("placeholder", name, name=name)
    elif target == "get_attr" and not form.of_functions:
        held = reader.take("name")
        if held not in form.attributes or reader.arguments() != ((), {}):
            raise ValueError(f"no tensor that the graph holds is called {held}")
        node = graph.create_node("get_attr", held, name=name)
    else:
        args, kwargs = reader.arguments()
        if target in MODE_SWITCHES and not form.of_functions:
            function = MODE_SWITCHES[target]
        else:
            function = named(target)
            check_arguments(function, args, kwargs)
        _check_plain((args, kwargs))
        node = graph.create_node("call_function", function, args, kwargs, name)
    if node.name != name or name == "self":
        raise ValueError(f"%{name} is not free as a name")
    node.meta["val"] = value
    node.meta |= _read_marks(reader, form)
    if reader.skip("#"):
        node.meta["stack_trace"] = _stack_trace(reader.string())
    return node


def _read_marks(reader: Reader, form: GraphForm) -> Marks:
    return form.meta(_by_name(reader) if reader.sees("{") else {})


def _by_name(reader: Reader) -> dict[str, Any]:
    value = reader.value()
    if not isinstance(value, dict):
        raise ValueError("expected strings in front of the colons")
    return value


def _described(value: object) -> object:
    """A node's value as it is written: layouts in place of tensors."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        sizes = (*value.shape, *value.stride())
        if any(type(size) is not int for size in sizes):  # to make a number of it would fix it
            return value
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
    """Raise ValueError for a value that is no argument of an operator."""
    match value:
        case list() | tuple():
            for part in value:
                _check_plain(part)
        case Record() | Layout():
            raise ValueError("an operator takes no dataclass")
        case Pairs():
            raise ValueError("an operator takes no dict but of strings")
        case dict():
            _check_plain([*value.values()])
        case slice():
            _check_plain([value.start, value.stop, value.step])


def _is_known(source: str) -> bool:
    return bool(_SOURCE.fullmatch(source) or _MODULE.fullmatch(source))


def _stack_trace(source: str) -> str:
    """A stack trace of which `source_line` gives `source`."""
    if (module := _MODULE.fullmatch(source)) is not None:
        return module_trace(module[1] or "", module[2])
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise ValueError(f"not a source line: {source!r}")
    file, line, function, text = match.groups()
    return f'  File "{file}", line {line}, in {function}\n    {text}\n'
