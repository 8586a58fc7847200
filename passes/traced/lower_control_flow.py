"""Turn captured loops and branches into operators with named bodies, where autograd runs them.

Before   %r = ipu.control_flow([%h, %x, %w], 3)
After    %r = ipu.loop([%h], [%x], [%w], 100, "body_4f0c...");  and for its gradient
         %g = ipu.loop([%dh, %zero], [%dy, %kept], [%w], 100, "body_9a1e...", True)
Keeps    values. The gradient of a loop is a loop in reverse order; its body reads what each
         iteration of the forward loop kept. That of a branch is a branch. Bodies are functional.
Source   PyTorch's AOTAutograd, for the gradient of a body.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.capture.control_flow.trace_control_flow import (
    NO_GRADIENT,
    WITH_GRADIENT,
    ControlFlow,
)
from ipu_dynamo.capture.private.tracing import export_joint, fake_mode, outside_modes
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.bodies import Body
from ipu_dynamo.ops.control_flow import (
    FLOW,
    branch_op,
    control_flow_op,
    flow_of,
    hold_bodies,
    loop_op,
    while_loop_op,
)
from ipu_dynamo.ops.marks.inner_gradients import (
    HOOK,
    hook_op,
    require_gradient_op,
    take_gradients_op,
)
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.graph.body_gradient import CutBody, cut_body, read_joint
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.traced.take_gradients import take_gradients
from ipu_dynamo.program import TensorType
from ipu_dynamo.program.ir.function import body_of

aten = torch.ops.aten
_MOST_NUMBERS = 32  # different ones, in a constant that a body computes
Run = Callable[..., Sequence[Tensor]]


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
        """Go on with a leaf, of which a gradient is required or not, in place of `value`."""
        node = self.running.args[0]
        assert isinstance(node, fx.Node)
        if value.requires_grad != required:
            self.env[node] = value.detach().requires_grad_(required)

    def run_node(self, n: fx.Node) -> Any:
        self.running = n
        return super().run_node(n)


def call_flow(tensors: Sequence[Tensor], handle: int) -> list[Tensor]:
    """Call a loop or branch of Dynamo's graph, by its handle."""
    flow = flow_of(handle)
    assert isinstance(flow, ControlFlow)
    return run_flow(flow, tensors)


def run_flow(flow: ControlFlow, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call the operator of a loop or a branch, with a gradient where a tensor requires one."""
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    if not any(wanted):
        return _called(flow, _forward_bodies(flow), tensors)
    if flow.kind == "while_loop":
        raise CompileError(NO_GRADIENT, where=flow.where, hint=WITH_GRADIENT, id="control-flow")
    if flow.kind == "loop":
        return list(_Loop.apply(_loop_gradient(flow, wanted), *tensors))  # type: ignore[no-untyped-call]
    return list(_Branch.apply(_branch_gradient(flow, wanted), *tensors))  # type: ignore[no-untyped-call]


def _called(flow: ControlFlow, bodies: Sequence[Body], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call the operator, with these bodies."""
    carried, rest = list(tensors[: flow.carried]), tensors[flow.carried :]
    scanned, captured = list(rest[: flow.scanned]), list(rest[flow.scanned :])
    names = [body.name for body in bodies]
    results: list[Tensor]
    if flow.kind == "loop":
        results = loop_op(carried, scanned, captured, flow.count, *names)
    elif flow.kind == "while_loop":
        results = while_loop_op(carried, captured, *names)
    else:
        results = branch_op(carried[0], captured, *names)
    return results


def _forward_bodies(flow: ControlFlow) -> list[Body]:
    """The bodies of a flow that needs no gradient."""
    bodies = [
        functional(_runs(body), [n.meta["val"] for n in body.placeholder_nodes])
        for body in flow.bodies
    ]
    flow.lowered += bodies
    return bodies


def _runs(body: Capture) -> Run:
    return _flat(body.graph)


def _flat(graph: fx.GraphModule) -> Run:
    module = module_of(graph.graph, graph)
    return lambda *tensors: FlowInterpreter(module).run(*tensors)


def functional(run: Run, likes: Sequence[Tensor]) -> Body:
    """The body that computes what `run` does, of dense tensors like these."""
    graph = _exported(run, [(like, False) for like in likes])
    joint = read_joint(graph.graph)
    graph.graph.output_node().args = (tuple(joint.results),)
    return _body(graph)


def _body(module: fx.GraphModule) -> Body:
    """The body that a graph is; a copy of a dense result is none."""
    graph = module.graph
    returned = []
    for node in graph.output_node().args[0]:  # type: ignore[union-attr]
        assert isinstance(node, fx.Node)
        source = node.args[0]
        copies = node.target is aten.clone.default and isinstance(source, fx.Node)
        dense = copies and source.meta["val"].is_contiguous()  # type: ignore[union-attr]
        returned.append(source if dense else node)
    output = graph.output_node()
    output.args, output.meta = (tuple(returned),), {"val": None}
    graph.eliminate_dead_code()
    for node in graph.nodes:
        node.meta.setdefault("val", None)
    module.recompile()
    return body_of(module)


def _exported(run: Run, likes: Sequence[tuple[Tensor, bool]]) -> fx.GraphModule:
    """The functional graph of `run`, joint where a tensor requires a gradient."""
    mode = fake_mode()
    with outside_modes(), torch.inference_mode(False):
        with mode:
            examples = [
                torch.empty(
                    [int(size) for size in like.shape], dtype=like.dtype, device=like.device
                ).requires_grad_(wanted)
                for like, wanted in likes
            ]
        with torch.set_grad_enabled(any(wanted for _, wanted in likes)):
            module = export_joint(_Copying(run), examples, mode)
    hold_bodies(module.graph)
    _write_constants(module)
    return module


def _write_constants(module: fx.GraphModule) -> None:
    """Compute the tensors that a body holds, such as `torch.tensor(0.5)`: it has no variables."""
    constants = set()
    for node in list(module.graph.find_nodes(op="get_attr")):
        value = getattr(module, str(node.target))
        if not isinstance(value, Tensor):
            continue
        with outside_modes():
            numbers = value.flatten().tolist()
        if len(set(numbers)) > 1 and len(numbers) > _MOST_NUMBERS:
            raise CompileError(
                f"the body of a loop or branch holds a constant of {len(numbers)} numbers",
                node=next(iter(node.users), node),
                hint="make it a buffer of the model, or an input",
                id="control-flow",
            )
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        with module.graph.inserting_before(node):
            if len(set(numbers)) < 2:
                full = [list(value.shape), *(numbers[:1] or [0])]
                made = call(module.graph, aten.full.default, *full, origin=node, **options)
            else:
                parts = [
                    call(module.graph, aten.full.default, [], number, origin=node, **options)
                    for number in numbers
                ]
                flat = call(module.graph, aten.stack.default, parts, origin=node)
                made = call(module.graph, aten.view.default, flat, list(value.shape), origin=node)
        for copy in [u for u in node.users if u.target is aten.lift_fresh_copy.default]:
            copy.replace_all_uses_with(made)  # which is new in each iteration
            module.graph.erase_node(copy)
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)
        constants.add(str(node.target))
    for name in constants:  # a compiler would make inputs of what a module holds
        delattr(module, name)


class _Copying(nn.Module):
    """Call a function; its results are dense, and lie in memory of their own."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = self.run(*tensors)
        return tuple(result.clone(memory_format=torch.contiguous_format) for result in results)


@dataclass(frozen=True, eq=False)
class _LoopGradient:
    """A loop that keeps what its gradient reads, and that gradient.

    Args:
        results: how many the loop has; behind them it returns what is kept.
        differentiable: numbers of the results with a gradient.
        carried: numbers of the inputs whose gradients are carried, and of those whose gradients
            are sums over iterations; then of those that have gradients row by row.
        stacked: numbers of stacked results whose gradients are read row by row.
        scanned, captured: numbers of the inputs that the gradient reads.
    """

    flow: ControlFlow
    forward: Body
    backward: Body
    results: int
    differentiable: frozenset[int]
    carried: tuple[int, ...]
    summed: tuple[int, ...]
    rows: tuple[int, ...]
    stacked: tuple[int, ...]
    scanned: tuple[int, ...]
    captured: tuple[int, ...]


def _loop_gradient(flow: ControlFlow, wanted: Sequence[bool]) -> _LoopGradient:
    """The gradient of a loop for the inputs where it is `wanted`, and for all that it carries."""
    (body,) = flow.bodies
    likes = [n.meta["val"] for n in body.placeholder_nodes]
    rows = range(flow.carried, flow.carried + flow.scanned)
    floats = [like.is_floating_point() or like.is_complex() for like in likes]
    asked = [
        is_float and (number < flow.carried or wanted[number])
        for number, is_float in enumerate(floats)
    ]
    joint = _exported(_runs(body), list(zip(likes, asked, strict=True)))
    cut = cut_body(joint.graph, lambda number: number >= rows.stop)
    found = cut.joint
    count = len(found.results)
    again = [i for i in cut.read if i < flow.carried]  # what is carried changes: it is kept, too

    def forward(*tensors: Tensor) -> list[Tensor]:
        made = fx.Interpreter(cut.forward).run(*tensors)
        return [*made, *(tensors[i] for i in again)]

    carried = tuple(i for i in range(flow.carried) if floats[i])
    summed = tuple(i for i in found.gradients if i >= rows.stop)
    of_rows = tuple(i for i in found.gradients if i in rows)
    stacked = tuple(i for i in found.tangents if i >= flow.carried)
    scanned = tuple(i for i in cut.read if i in rows)
    captured = tuple(i for i in cut.read if i >= rows.stop)

    def backward(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        of_carried = {i: next(given) for i in carried}
        sums = {i: next(given) for i in summed}
        of_stacked = {i: next(given) for i in stacked}
        kept = [next(given) for _ in cut.kept]
        inputs = {i: next(given) for i in (*again, *scanned, *captured)}
        tangents = {**of_carried, **of_stacked}
        gradients = _gradients(cut, kept, inputs, tangents)
        return [
            *(gradients[i] if i in gradients else torch.zeros_like(of_carried[i]) for i in carried),
            *(sums[i] + gradients[i] for i in summed),
            *(gradients[i] for i in of_rows),
        ]

    values = [likes[i] for i in (*carried, *summed)]
    values += [found.results[i].meta["val"] for i in stacked]
    values += [node.meta["val"] for node in cut.kept]
    values += [likes[i] for i in (*again, *scanned, *captured)]
    ahead, back = functional(forward, likes), functional(backward, values)
    flow.lowered += [ahead, back]
    return _LoopGradient(
        flow, ahead, back, count,
        frozenset(found.tangents), carried, summed, of_rows, stacked, scanned, captured,
    )  # fmt: skip


def _gradients(
    cut: CutBody, kept: Sequence[Tensor], inputs: dict[int, Tensor], tangents: dict[int, Tensor]
) -> dict[int, Tensor]:
    """What the backward half of a body computes, by numbers of inputs."""
    given = [*kept, *(inputs[i] for i in cut.read), *(tangents[i] for i in cut.joint.tangents)]
    made = fx.Interpreter(cut.backward).run(*given)
    return dict(zip(cut.joint.gradients, made, strict=True))


class _Loop(torch.autograd.Function):
    """A loop, for autograd."""

    @staticmethod
    def forward(ctx: Any, plan: _LoopGradient, *tensors: Tensor) -> tuple[Tensor, ...]:
        made = _called(plan.flow, [plan.forward], tensors)
        results, kept = made[: plan.results], made[plan.results :]
        ctx.plan, ctx.like = plan, [(t.shape, t.dtype, t.device) for t in tensors]
        ctx.made = [(t.shape, t.dtype, t.device) for t in results]
        read = [tensors[i] for i in (*plan.scanned, *plan.captured)]
        ctx.save_for_backward(*kept, *read)
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(results) if i not in plan.differentiable)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: _LoopGradient = ctx.plan
        saved = list(ctx.saved_tensors)
        captured = [saved.pop() for _ in plan.captured][::-1]
        tangents = [
            _zeros(like) if of is None else of
            for of, like in zip(of_results, ctx.made, strict=True)
        ]
        carried = [tangents[i] for i in plan.carried] + [_zeros(ctx.like[i]) for i in plan.summed]
        scanned = [tangents[i] for i in plan.stacked] + saved
        made = loop_op(carried, scanned, captured, plan.flow.count, plan.backward.name, True)
        gradients: list[Tensor | None] = [None] * len(ctx.like)
        for number, gradient in zip((*plan.carried, *plan.summed, *plan.rows), made, strict=True):
            gradients[number] = gradient
        return None, *gradients


def _zeros(like: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


@dataclass(frozen=True, eq=False)
class _BranchGradient:
    """A branch that keeps what its gradient reads, and that gradient.

    Args:
        forward: both branches; they return the results, and in the same places what is kept.
        backward: both gradients.
        results: how many the branch has.
        differentiable: numbers of the results with a gradient in any branch.
        gradients, read: numbers of the inputs that have gradients in any branch, and of those that
            any gradient reads.
    """

    flow: ControlFlow
    forward: tuple[Body, Body]
    backward: tuple[Body, Body]
    results: int
    differentiable: tuple[int, ...]
    gradients: tuple[int, ...]
    read: tuple[int, ...]


def _branch_gradient(flow: ControlFlow, wanted: Sequence[bool]) -> _BranchGradient:
    """The gradient of a branch for the inputs where it is `wanted`; the first is the predicate."""
    likes = [n.meta["val"] for n in flow.bodies[0].placeholder_nodes]
    asked = list(zip(likes, wanted[1:], strict=True))
    cuts = [cut_body(_exported(_runs(b), asked).graph, lambda _: True) for b in flow.bodies]
    places, slots = _slots([[n.meta["val"] for n in cut.kept] for cut in cuts])
    gradients = tuple(sorted({i for cut in cuts for i in cut.joint.gradients}))
    tangents = tuple(sorted({i for cut in cuts for i in cut.joint.tangents}))
    read = tuple(sorted({i for cut in cuts for i in cut.read}))
    results = [node.meta["val"] for node in cuts[0].joint.results]
    values = [*slots, *(likes[i] for i in read), *(results[i] for i in tangents)]

    def forward(cut: CutBody, places: Sequence[int]) -> Run:
        def run(*tensors: Tensor) -> list[Tensor]:
            made = fx.Interpreter(cut.forward).run(*tensors)
            kept = dict(zip(places, made[len(results) :], strict=True))
            filled = [kept[n] if n in kept else _blank(slot) for n, slot in enumerate(slots)]
            return [*made[: len(results)], *filled]

        return run

    def backward(cut: CutBody, places: Sequence[int]) -> Run:
        def run(*tensors: Tensor) -> list[Tensor]:
            given = iter(tensors)
            kept = [next(given) for _ in slots]
            inputs = {i: next(given) for i in read}
            of_results = {i: next(given) for i in tangents}
            made = _gradients(cut, [kept[n] for n in places], inputs, of_results)
            return [made[i] if i in made else _blank(likes[i]) for i in gradients]

        return run

    pairs = list(zip(cuts, places, strict=True))
    ahead = [functional(forward(*pair), likes) for pair in pairs]
    back = [functional(backward(*pair), values) for pair in pairs]
    flow.lowered += [*ahead, *back]
    return _BranchGradient(
        flow, (ahead[0], ahead[1]), (back[0], back[1]), len(results), tangents, gradients, read
    )


def _slots(kept: Sequence[Sequence[Tensor]]) -> tuple[list[list[int]], list[Tensor]]:
    """Places for what branches keep: each value has one, of its type; branches share them."""
    slots: list[Tensor] = []
    places = []
    for values in kept:
        free = list(range(len(slots)))
        mine = []
        for value in values:
            type_ = TensorType.of(value)
            place = next((n for n in free if TensorType.of(slots[n]) == type_), len(slots))
            if place == len(slots):
                slots.append(value)
            else:
                free.remove(place)
            mine.append(place)
        places.append(mine)
    return places, slots


def _blank(like: Tensor) -> Tensor:
    return torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)


class _Branch(torch.autograd.Function):
    """A branch, for autograd."""

    @staticmethod
    def forward(ctx: Any, plan: _BranchGradient, *tensors: Tensor) -> tuple[Tensor, ...]:
        made = _called(plan.flow, plan.forward, tensors)
        results, kept = made[: plan.results], made[plan.results :]
        ctx.plan, ctx.inputs = plan, len(tensors)
        ctx.made = [(t.shape, t.dtype, t.device) for t in results]
        ctx.save_for_backward(tensors[0], *kept, *(tensors[1 + i] for i in plan.read))
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(results) if i not in plan.differentiable)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: _BranchGradient = ctx.plan
        predicate, *saved = ctx.saved_tensors
        tangents = []
        for number in plan.differentiable:
            of = of_results[number]
            tangents.append(_zeros(ctx.made[number]) if of is None else of)
        names = [body.name for body in plan.backward]
        made = branch_op(predicate, [*saved, *tangents], *names)
        gradients: list[Tensor | None] = [None] * ctx.inputs
        for number, gradient in zip(plan.gradients, made, strict=True):
            gradients[1 + number] = gradient
        return None, *gradients
