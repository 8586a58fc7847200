"""Run captured loops and branches as operators with named bodies, for `Differentiate`.

The gradient of a loop is a loop in reverse order. Its body reads the values that each iteration of
the forward loop kept: `ipu.loop([%dh, %zero], [%dy, %kept], [%w], 100, "body_9a1e...", True)`. The
gradient of a branch is a branch. Bodies are functional. AOTAutograd differentiates them, and
`CutBody` cuts them. The gradients that forward takes, `ipu.take_gradients`, are their operators,
which are differentiated with the others.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.capture.control_flow.trace_control_flow import (
    NO_GRADIENT,
    WITH_GRADIENT,
    ControlFlow,
    Lowered,
)
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.bodies import Body
from ipu_dynamo.ops.control_flow import FLOW, control_flow_op, flow_of
from ipu_dynamo.ops.marks.inner_gradients import (
    HOOK,
    hook_op,
    require_gradient_op,
    take_gradients_op,
)
from ipu_dynamo.ops.private.autograd_engine import differentiable_once
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.traced.control_flow.branch_gradient import (
    branch_gradient,
    differentiable_branch,
)
from ipu_dynamo.passes.traced.control_flow.call_operators import call_operator
from ipu_dynamo.passes.traced.control_flow.functional_bodies import Run, functional
from ipu_dynamo.passes.traced.control_flow.loop_gradient import differentiable_loop, loop_gradient


class FlowInterpreter(fx.Interpreter):
    """Run a traced graph; loops and branches in it become operators, and hooks act."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is control_flow_op:
            flow = self.running.meta[FLOW]
            return run_flow(flow, args[0])
        if target is require_gradient_op:
            return self._require_gradient(*args)
        if target is hook_op:
            hook = self.running.meta[HOOK]
            return args[0].register_hook(lambda g: _flat(hook)(g, *args[1])[0])
        if target is take_gradients_op:
            return take_gradients(args, self.running)
        return super().call_function(target, args, kwargs)

    def _require_gradient(self, value: Tensor, required: bool) -> None:
        """Replace `value` by a leaf that requires a gradient, or does not."""
        node = self.running.args[0]
        assert isinstance(node, fx.Node)
        if value.requires_grad != required:
            self.env[node] = value.detach().requires_grad_(required)

    def run_node(self, n: fx.Node) -> Any:
        self.running = n
        return super().run_node(n)


def take_gradients(args: tuple[Any, ...], node: fx.Node) -> list[Tensor]:
    """The gradients that a model takes in forward: those that a trace saw."""
    results, inputs, *_, create = args
    again = create and differentiable_once(results, inputs)
    gradients: list[Tensor] = take_gradients_op(*args)
    if len(gradients) == len(inputs) and not again:
        return gradients
    raise CompileError(
        "a gradient that the model takes in forward passes through a loop, a branch, a recurrent "
        "layer, an exchange of replicas or a loss whose gradient has no gradient",
        node=node,
        hint="detach what it shall not depend on, or write that part in operators of PyTorch",
        id="gradient",
    )


def call_flow(tensors: Sequence[Tensor], handle: int) -> list[Tensor]:
    """Call a loop or branch of Dynamo's graph, by its handle."""
    flow = flow_of(handle)
    assert isinstance(flow, ControlFlow)
    return run_flow(flow, tensors)


def run_flow(flow: ControlFlow, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call the operator of a loop or a branch, with a gradient where a tensor requires one."""
    wanted = tuple(torch.is_grad_enabled() and t.requires_grad for t in tensors)
    if wanted not in flow.lowered:
        flow.lowered[wanted] = _lowered(flow, wanted)
    return flow.lowered[wanted](tensors)


def _lowered(flow: ControlFlow, wanted: Sequence[bool]) -> Lowered:
    """Return a callable of the operator, with gradients for the `wanted` tensors."""
    if not any(wanted):
        return partial(call_operator, flow, _forward_bodies(flow))
    if flow.kind == "while_loop":
        raise CompileError(NO_GRADIENT, where=flow.where, hint=WITH_GRADIENT, id="control-flow")
    if flow.kind == "loop":
        return partial(differentiable_loop, loop_gradient(flow, wanted, _run_of))
    return partial(differentiable_branch, branch_gradient(flow, wanted, _run_of))


def _forward_bodies(flow: ControlFlow) -> list[Body]:
    """The bodies of a flow that needs no gradient."""
    return [
        functional(_run_of(body), [n.meta["val"] for n in body.placeholder_nodes])
        for body in flow.bodies
    ]


def _run_of(body: Traced) -> Run:
    return _flat(body.graph)


def _flat(graph: fx.GraphModule) -> Run:
    module = module_of(graph.graph, graph)
    return lambda *tensors: FlowInterpreter(module).run(*tensors)
