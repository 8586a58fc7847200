"""Insert operators into a graph with the metadata that passes rely on."""

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import BACKWARD, STAGE
from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.marks.inner_gradients import take_gradients_op
from ipu_dynamo.program import GROUP
from ipu_dynamo.program.machine_marks import MACHINE, run_nothing
from ipu_dynamo.program.text.graph_text import MEMORY, SERIAL_STEP

_INHERITED = (STAGE, BACKWARD, "stack_trace")


def call(
    graph: fx.Graph,
    target: Any,
    *args: Any,
    origin: fx.Node,
    name: str | None = None,
    **kwargs: Any,
) -> fx.Node:
    """Insert a call at the graph's insertion point, placed and blamed where `origin` is.

    The node is called `name`, with a number after it if that name is taken.
    """
    node = graph.create_node("call_function", target, args, kwargs, name)
    node.meta = {key: origin.meta[key] for key in _INHERITED if key in origin.meta}
    node.meta["val"] = evaluate(node, origin)
    return node


def call_on(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call with its fake value, in a graph whose nodes have neither place nor line."""
    node = graph.call_function(target, args, kwargs)
    values, named = map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*values, **named)
    return node


def new_input(graph: fx.Graph, name: str, last: fx.Node | None) -> fx.Node:
    """Insert a placeholder after the `last` one, or before all operators if there is none yet."""
    with graph.inserting_after(last) if last is not None else graph.inserting_before():
        node = graph.placeholder(identifier(name))
    node.target = node.name  # unique, as an argument of Python code has to be
    return node


def identifier(name: str) -> str:
    """`name` as a Python identifier, for a node."""
    name = name.replace("..", ".")  # of made names
    text = "".join(c if c.isalnum() else "_" for c in name).strip("_") or "value"
    return f"v{text}" if text[0].isdigit() else text


def evaluate(node: fx.Node, origin: fx.Node | None = None) -> Any:
    """The fake value of a call, from the fake values of its arguments, or in `origin`'s mode."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    known = [source.meta["val"] for source in node.all_input_nodes]
    known += [origin.meta["val"]] if origin is not None else []
    with fake_mode_of(known), torch.no_grad():
        if node.target is take_gradients_op:
            inputs: Any = args[1]
            # Values that were evaluated again lead to nothing in autograd.
            return [torch.empty_like(x, requires_grad=False) for x in inputs]
        return node.target(*args, **kwargs)  # type: ignore[operator]


def keep_plan(product: fx.Node, *replacements: fx.Node) -> None:
    """Give the replacements of a product the plan of its own: group, serial step, memory."""
    for key in (GROUP, SERIAL_STEP, MEMORY):
        if key in product.meta:
            planned = product.meta.pop(key)
            for replacement in replacements:
                replacement.meta[key] = planned


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let the readers of `old` read `new`.

    If the strides differ, recompute the metadata of users whose layout follows their input: views
    and layout-preserving operators.
    """
    old.replace_all_uses_with(new)
    changed = [new] if _strides(new) != _strides(old) else []
    while changed:
        for user in changed.pop().users:
            if user.op == "call_function":
                before = _strides(user)
                user.meta["val"] = evaluate(user)
                changed += [user] if _strides(user) != before else []


def _strides(node: fx.Node) -> list[tuple[int, ...]]:
    """Of every tensor that a node makes."""
    values = node.meta["val"]
    values = values if isinstance(values, tuple | list) else [values]
    return [value.stride() for value in values if isinstance(value, torch.Tensor)]


def become(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> None:
    """Turn `node` into this call; it keeps its name, its place and the layout of its result.

    If it takes a copy to that layout, the copied operator gets the machine mark of `node`.
    """
    before = node.meta["val"]
    node.target, node.args, node.kwargs = target, args, kwargs
    after = evaluate(node)
    node.meta["val"] = after
    if after.stride() == before.stride():
        return
    with node.graph.inserting_before(node):
        dense = call(node.graph, target, *args, origin=node, name=f"{node.name}_dense", **kwargs)
        size, stride = list(before.shape), list(before.stride())
        options = {"dtype": after.dtype, "device": after.device}
        empty = call(node.graph, aten.empty_strided.default, size, stride, origin=node, **options)
    run_nothing(empty)
    if MACHINE in node.meta:
        dense.meta[MACHINE] = node.meta[MACHINE]
    run_nothing(node)
    node.target, node.args, node.kwargs = aten.copy.default, (empty, dense), {}
    node.meta["val"] = evaluate(node)
