"""Write a graph as Python that calls each operator directly.

FX's own code finds an operator by four attributes and calls it through a Python function. For a
small operator that takes as long as its arithmetic. FX's code also holds its arguments to the end;
this code empties the list in which it gets them.

If an argument is transposed, some operators lay out their results in another way than the trace
says: `copysign`, batch norm, gradients of losses. A view after one of them would fail, or
`as_strided` would show other elements. Such results are copied.
"""

import re
from collections.abc import Mapping
from operator import getitem
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.control_flow import bound
from ipu_dynamo.ops.graph_queries import is_new
from ipu_dynamo.ops.private.graphs import implementation
from ipu_dynamo.runtime.engines.layouts import with_layout
from ipu_dynamo.runtime.engines.stage import Stage

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_NONE: Mapping[str, Stage] = {}
_SOURCE = "__source__"  # name of the lines of the code, among its global names
_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def eager_code(graph: fx.Graph, bodies: Mapping[str, Stage] = _NONE) -> Stage:
    """A function on the list of the graph's inputs; a value ends after its last use, as with FX.

    Args:
        bodies: callables of the bodies of loops and branches, by name.
    """
    copied = _with_linear(graph)
    for node in copied.nodes:
        if bodies and bodies_of(node):
            node.target = bound(node, bodies)
    copied.set_codegen(_OfList())
    written = copied.python_code("self")
    names = dict(written.globals)

    def name(match: re.Match[str]) -> str:
        namespace, operator, overload = match.groups()
        packet = getattr(getattr(torch.ops, namespace), operator)
        short = f"{namespace}_{operator}_{overload}"
        names[short] = implementation(getattr(packet, overload))
        return f"{short}("

    source = _OPERATOR.sub(name, written.src)
    names[_SOURCE] = source.splitlines()
    exec(compile(source, "<stage>", "exec"), names)
    forward: Stage = names["forward"]
    return forward


def running_node(frame: FrameType | None) -> str:
    """The name of the node of such code that calls `frame`, directly or not."""
    while frame is not None:
        if source := frame.f_globals.get(_SOURCE):
            return _made_in(source[frame.f_lineno - 1])
        frame = frame.f_back
    return ""


def _made_in(line: str) -> str:
    return line.partition("=")[0].partition(":")[0].strip()


def failed_in(error: Exception) -> list[str]:
    """Return the name of the node that raised `error`, if a line of such code did.

    After the name of a loop or branch there is the name of a node in its body.
    """
    return [
        _made_in(source[line - 1])
        for frame, line in walk_tb(error.__traceback__)
        if (source := frame.f_globals.get(_SOURCE))
    ]


class _OfList(fx.graph.CodeGen):
    """Write a function on the list of the graph's inputs, which takes them out of it."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [variable.partition(":")[0].strip() for variable in free_vars if variable != "self"]
        taken = f"    [{', '.join(names)}] = arguments\n    arguments.clear()\n"
        return f"def forward(arguments):\n{taken}"


def _with_linear(graph: fx.Graph) -> fx.Graph:
    """Copy `graph` with one call for a layer's product, as in the model.

    AOTAutograd writes `linear(x, w, b)` as `addmm(b, x, t(w))`, and `linear` does the same inside.
    """
    copied = fx.Graph()
    of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if layer := _layer(node):
            arguments = tuple(of[argument] for argument in layer)
            of[node] = copied.create_node("call_function", F.linear, arguments, name=node.name)
        else:
            of[node] = copied.node_copy(node, of.__getitem__)
            if has_unsure_layout(node):
                stride = tuple(node.meta["val"].stride())
                of[node] = copied.call_function(with_layout, (of[node], stride))
    for node in copied.find_nodes(op="call_function", target=aten.t.default):
        if not node.users:
            copied.erase_node(node)
    return copied


def has_unsure_layout(node: fx.Node) -> bool:
    """Whether a result may have another layout than the trace says.

    Results of products, and of operators on plain contiguous tensors, have the same one.
    """
    result = node.meta.get("val")
    if not isinstance(result, Tensor) or result.layout != torch.strided or not is_new(node):
        return False
    source = node.args[0] if node.target is getitem else node
    assert isinstance(source, fx.Node)
    values = [result, *(argument.meta.get("val") for argument in source.all_input_nodes)]
    contiguous = all(value.is_contiguous() for value in values if isinstance(value, Tensor))
    return not contiguous and source.target not in _PRODUCTS


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
