"""Turn Dynamo's operators that hold graphs into loops and branches of our own.

Before   def body(%c: f32[n], %row: f32[n]):
             %d = aten.add(%c, %row)
             return (%d, %row)
         %s = scan_op(body, [%h: f32[n]], [%x: f32[m,n]], [])  # model.py:3 in f: scan(f, h, x)
         %y = %s[0]
After    def body(%c: f32[n], %row: f32[n]):
             %d = aten.add(%c, %row)
             return (%d, %row)
         %s = call_flow([%h, %x], GraphFlow(
             "loop", 1, 1, m, "model.py:3 in f: scan(f, h, x)", bodies=(body,)
         ))
         %s                                                    # model.py:3 in f: scan(f, h, x)
         %y = %s[0]
Keeps    results and lines; inner ones of bodies are turned, too.
Source   PyTorch: the gradient of its scan is wrong when Inductor compiles it.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.capture.control_flow.trace_control_flow import (
    NO_GRADIENT,
    WITH_GRADIENT,
    ControlFlow,
    body_capture,
)
from ipu_dynamo.capture.private.subgraphs import cond_op, map_impl, scan_op, while_loop_op
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.ops.control_flow import FLOW, register_flow
from ipu_dynamo.ops.private.node_meta import EXAMPLE_VALUE
from ipu_dynamo.passes.graph.extract import copied
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.traced.control_flow.flow_interpreter import call_flow


class ReadHigherOrder(Pass):
    """The pass, on a graph that Dynamo captured."""

    level = "traced"
    acts_on = (cond_op, scan_op, map_impl, while_loop_op)
    needed = "programs have no operators that hold graphs as modules"

    def __call__(self, capture: Traced) -> bool:
        return _read(capture.graph)


def _read(module: fx.GraphModule) -> bool:
    """Turn the operators of a module, and of the bodies that it holds."""
    flows = [(node, parts) for node in module.graph.nodes if (parts := _parts(module, node))]
    for node, (flow, tensors) in flows:
        held = [source for source in node.all_input_nodes if source.op == "get_attr"]
        node.target, node.args, node.kwargs = call_flow, (tensors, register_flow(flow)), {}
        node.meta[FLOW] = flow
        for source in held:
            if not source.users:
                module.graph.erase_node(source)
    if flows:
        module.recompile()
    return bool(flows)


def _parts(module: fx.GraphModule, node: fx.Node) -> tuple[ControlFlow, list[fx.Node]] | None:
    """Read an operator as a loop or branch; return that, and the tensors that it takes."""
    where = source_line(node)
    args: Any = node.args
    if node.target is cond_op:
        predicate, then, otherwise, operands = args
        read = [predicate, *operands]
        flow = ControlFlow("branch", [], 1, where=where)
        bodies, first = [then, otherwise], 1
    elif node.target is scan_op:
        body, init, xs, captured = args
        read = [*init, *xs, *captured]
        count = int(_value(xs[0]).shape[0])
        flow = ControlFlow("loop", [], len(init), len(xs), count, where)
        bodies, first = [body], 0
    elif node.target is map_impl:
        body, xs, captured = args
        read = [*xs, *captured]
        flow = ControlFlow("loop", [], 0, len(xs), int(_value(xs[0]).shape[0]), where)
        bodies, first = [body], 0
    elif node.target is while_loop_op:
        condition, body, carried, captured = args
        read = [*carried, *captured]
        if torch.is_grad_enabled() and any(_is_tensor(v) and _value(v).requires_grad for v in read):
            raise CompileError(NO_GRADIENT, where=where, hint=WITH_GRADIENT, id="control-flow")
        flow = ControlFlow("while_loop", [], len(carried), where=where)
        bodies, first = [condition, body], 0
    else:
        return None
    numbers = {i: _number(value, node) for i, value in enumerate(read) if not _is_tensor(value)}
    if any(i < flow.carried + flow.scanned for i in numbers):
        raise CompileError(
            f"{flow.title} carries a number, or depends on one",
            node=node,
            hint="carry a tensor: torch.tensor(0)",
            id="control-flow",
        )
    for body in bodies:
        held = getattr(module, body.target)
        flow.bodies.append(_body(held, {i - first: number for i, number in numbers.items()}, node))
    return flow, [value for i, value in enumerate(read) if i not in numbers]


def _body(module: fx.GraphModule, numbers: dict[int, Any], node: fx.Node) -> Traced:
    """Copy a body, with known numbers in place of some inputs."""
    _read(module)
    graph, _ = copied(module.graph)
    result = graph.output_node()
    for inner in graph.nodes:
        inner.meta["val"] = inner.meta.get(EXAMPLE_VALUE)
    for number, placeholder in enumerate(list(graph.find_nodes(op="placeholder"))):
        if number in numbers:
            for user in list(placeholder.users):
                user.args = map_arg(user.args, _filled(placeholder, numbers[number]))
                user.kwargs = map_arg(dict(user.kwargs), _filled(placeholder, numbers[number]))
            graph.erase_node(placeholder)
    returned: Any = result.args[0]
    returned = tuple(returned) if isinstance(returned, list | tuple) else (returned,)
    for value in returned:
        if not _is_tensor(value):
            raise CompileError(
                f"the body of a loop or branch returns {value}, which is no tensor",
                node=node,
                hint="return tensors only",
                id="control-flow",
            )
    result.args = (returned,)
    return body_capture(fx.GraphModule(module, graph))


def _filled(placeholder: fx.Node, number: Any) -> Any:
    return lambda node: number if node is placeholder else node


def _value(value: Any) -> Any:
    return value.meta.get(EXAMPLE_VALUE) if isinstance(value, fx.Node) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(_value(value), Tensor)


def _number(value: Any, node: fx.Node) -> Any:
    """A number that an operator reads, with its present value."""
    known = _value(value)
    if isinstance(known, torch.SymInt):
        return int(known)
    if isinstance(known, int | float):
        return known
    raise CompileError(
        f"a loop or branch reads {value}, which is neither a tensor nor a number",
        node=node,
        hint="pass tensors",
        id="control-flow",
    )
