"""Capture loops and branches: one operator, which holds the graphs of its bodies.

Before autograd a loop or branch is `ipu::control_flow(tensors, handle)`. The handle is of a
ControlFlow, which the node holds, too; `Differentiate` turns it into the operators of
`ops/control_flow.py`, whose bodies have names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import OutputRole, Placeholder, Traced
from ipu_dynamo.capture.private.subgraphs import example, quote_body, trace_body
from ipu_dynamo.capture.private.tracing import fake_mode_of, flatten, graph_being_traced, pytree
from ipu_dynamo.capture.scopes import SCOPE
from ipu_dynamo.errors import CompileError, called_from
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.control_flow import FLOW, control_flow_op, register_flow
from ipu_dynamo.ops.graph_queries import owner, written_arguments
from ipu_dynamo.program import TensorType

Kind = Literal["loop", "while_loop", "branch"]
Lowered = Callable[[Sequence[Tensor]], list[Tensor]]
NO_GRADIENT = "a while_loop has no gradient, because nobody knows how often it will run"
WITH_GRADIENT = "use scan or ipu_dynamo.for_loop, or detach what it reads"


@dataclass(eq=False)
class ControlFlow:
    """A loop or a branch, before autograd.

    It takes tensors of three kinds, in this order. An iteration gets carried ones from the one
    before (a branch has its predicate instead). It reads one row of each scanned tensor. The others
    are the same for all iterations.

    Args:
        bodies: its graphs: a loop has one, a branch two, a `while_loop` condition and body. Each
            takes the carried tensors (not the predicate), a row of each scanned one, and the rest.
        carried, scanned: how many tensors are.
        count: of iterations.
        where: the user's line.
        lowered: the calls of its operator, by which of its tensors require a gradient: PyTorch runs
            a graph several times while it differentiates it, and each run needs the same bodies.
    """

    kind: Kind
    bodies: list[Traced]
    carried: int
    scanned: int = 0
    count: int = 0
    where: str = ""
    lowered: dict[tuple[bool, ...], Lowered] = field(default_factory=dict)

    @property
    def results(self) -> list[Tensor]:
        """Its results, as empty tensors; in a fake or meta mode they are tensors of that mode."""
        tensors = []
        for number, node in enumerate(self.bodies[-1].returned):
            assert node is not None
            like = node.meta["val"]
            stacked = self.kind == "loop" and number >= self.carried
            shape = [self.count, *like.shape] if stacked else list(like.shape)
            tensors.append(torch.empty(shape, dtype=like.dtype, device=like.device))
        return tensors

    @property
    def title(self) -> str:
        """Its name in messages to users."""
        return {"loop": "a loop", "while_loop": "a while_loop", "branch": "a cond"}[self.kind]


@dataclass
class _Traced:
    """A function as a graph, and how its result is put together."""

    graph: fx.GraphModule
    captured: list[Tensor]
    spec: pytree.TreeSpec
    results: list[Tensor]


def trace_loop(
    body: Callable[..., Any],
    carried: Sequence[Tensor],
    scanned: Sequence[Tensor],
    captured: Sequence[Tensor],
    count: int,
) -> tuple[pytree.TreeSpec, list[Tensor]]:
    """Record a loop; the results, and how those of the body are put together."""
    quote_body(body)
    where, mode = called_from(), fake_mode_of([*carried, *scanned, *captured])
    examples = [example(mode, t) for t in carried] + [example(mode, t, row=True) for t in scanned]
    traced = _trace(body, [*examples, *(example(mode, t) for t in captured)], where)
    _check_carried(carried, traced.results, where, surplus=bool(scanned))
    flow = ControlFlow(
        "loop",
        _captures([traced], len(carried) + len(scanned), where),
        len(carried),
        len(scanned),
        count,
        where,
    )
    return traced.spec, _record(flow, [*carried, *scanned, *captured, *traced.captured])


def trace_while(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    carried: Sequence[Tensor],
    captured: Sequence[Tensor] = (),
) -> tuple[pytree.TreeSpec, list[Tensor]]:
    """Record a loop that runs as long as a condition holds."""
    quote_body(condition)
    quote_body(body)
    where, mode = called_from(), fake_mode_of([*carried, *captured])

    def examples() -> list[Tensor]:
        return [example(mode, tensor) for tensor in (*carried, *captured)]

    holds, traced = _trace(condition, examples(), where), _trace(body, examples(), where)
    _check_predicate(holds.results, where)
    _check_carried(carried, traced.results, where, surplus=False)
    bodies = _captures([holds, traced], len(carried), where)
    flow = ControlFlow("while_loop", bodies, len(carried), where=where)
    read = _united([holds, traced])
    return traced.spec, _record(flow, [*carried, *captured, *read])


def trace_branch(
    predicate: Tensor,
    then: Callable[..., Any],
    otherwise: Callable[..., Any],
    operands: Sequence[Tensor] = (),
) -> tuple[pytree.TreeSpec, list[Tensor]]:
    """Record a branch."""
    where, mode = called_from(), fake_mode_of([predicate, *operands])
    _check_predicate([predicate], where)
    both = [_trace(f, [example(mode, t) for t in operands], where) for f in (then, otherwise)]
    _check_branches(both[0], both[1], where)
    flow = ControlFlow("branch", _captures(both, 0, where), 1, where=where)
    read = _united(both)
    return both[0].spec, _record(flow, [predicate, *operands, *read])


def _record(flow: ControlFlow, tensors: Sequence[Tensor]) -> list[Tensor]:
    handle, graph = register_flow(flow), graph_being_traced()
    results: list[Tensor] = control_flow_op(list(tensors), handle)
    assert graph is not None, "there is no trace"
    node = next(n for n in reversed(graph.nodes) if n.target is control_flow_op)
    node.meta[FLOW] = flow
    return results


def _trace(function: Callable[..., Any], examples: list[Tensor], where: str) -> _Traced:
    specs: list[pytree.TreeSpec] = []
    traced_results: list[Tensor] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        results, spec = flatten(function(*tensors))
        for result in results:
            if not isinstance(result, Tensor):
                raise CompileError(
                    f"the body of a loop or branch returns {result!r}, which is no tensor",
                    where=where,
                    hint="return tensors only",
                    id="control-flow",
                )
        specs.append(spec)
        traced_results.extend(results)
        return tuple(results)

    graph, captured = trace_body(flat, examples)
    inputs = list(graph.graph.find_nodes(op="placeholder"))[len(examples) :]
    for number, node in enumerate(inputs):  # a new tensor in each iteration is one outside
        if all(user.target is aten.lift_fresh_copy.default for user in node.users):
            captured[number] = aten.lift_fresh_copy(captured[number])
    return _Traced(graph, captured, specs[0], traced_results)


def _united(bodies: Sequence[_Traced]) -> list[Tensor]:
    """The tensors from outside that at least one of the bodies reads, each once."""
    return list({id(t): t for traced in bodies for t in traced.captured}.values())


def _captures(bodies: Sequence[_Traced], by_value: int, where: str) -> list[Traced]:
    """Bodies that take the same inputs, of which they may change the first so many."""
    read = _united(bodies)
    return [_capture(traced, read, by_value, where) for traced in bodies]


def _capture(traced: _Traced, read: Sequence[Tensor], by_value: int, where: str) -> Traced:
    module, graph = traced.graph, traced.graph.graph
    inputs = list(graph.find_nodes(op="placeholder"))
    count = len(inputs) - len(traced.captured)
    own = {id(t): node for t, node in zip(traced.captured, inputs[count:], strict=True)}
    last = next(reversed(inputs[:count]), None)
    for number, tensor in enumerate(read):  # in the order of all bodies
        node = own.get(id(tensor))
        if node is None:
            node = graph.placeholder(f"unread_{number}")
            node.meta["val"] = tensor
        if last is None:
            first = next(iter(graph.nodes))
            if first is not node:
                first.prepend(node)
        else:
            last.append(node)
        last = node
    inputs = list(graph.find_nodes(op="placeholder"))
    _copy_written(graph, inputs, by_value, where)
    for node in graph.nodes:
        node.meta.setdefault("val", None)
        node.meta.setdefault(SCOPE, "")
    module.recompile()
    return body_capture(module)


def body_capture(module: fx.GraphModule) -> Traced:
    """A body, whose graph returns a tuple of tensors."""
    inputs = module.graph.find_nodes(op="placeholder")
    returned: Any = module.graph.output_node().args[0]
    return Traced(
        graph=module,
        placeholders=tuple(Placeholder(node.name, "input") for node in inputs),
        outputs=tuple(OutputRole("value", str(number)) for number in range(len(returned))),
    )


def writes_from_outside(write: fx.Node, where: str = "") -> CompileError:
    """The error for a body that changes a tensor in place that it does not get by value."""
    return CompileError(
        "the body of a loop or branch changes a tensor from outside in place, which may be a "
        "parameter",
        node=write,
        where="" if write.meta.get("stack_trace") else where,
        hint="carry it through the loop: pass it as an input, and return its new value",
        id="control-flow",
    )


def _copy_written(graph: fx.Graph, inputs: Sequence[fx.Node], by_value: int, where: str) -> None:
    """Let a body write to copies of the inputs that it gets by value; refuse other writes."""
    written = {owner(target): node for node in graph.nodes for target in written_arguments(node)}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for number, node in enumerate(inputs):
        if node not in written:
            continue
        if number >= by_value:
            raise writes_from_outside(written[node], where)
        with graph.inserting_before(first):
            copy = graph.call_function(aten.clone.default, (node,))
        copy.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(copy)
        copy.args = (node,)


def _check_carried(
    carried: Sequence[Tensor], results: Sequence[Tensor], where: str, *, surplus: bool
) -> None:
    """Raise unless a body returns the carried tensors with the types of its inputs.

    Args:
        surplus: it may return more, as that of a scan does.
    """
    if len(results) < len(carried) or (len(results) > len(carried) and not surplus):
        raise CompileError(
            f"the body of a loop returns {len(results)} tensors, and gets {len(carried)}",
            where=where,
            hint="return one tensor for each input",
            id="control-flow",
        )
    for number, (before, after) in enumerate(zip(carried, results, strict=False)):
        was, becomes = TensorType.of(before), TensorType.of(after)
        if was != becomes:
            raise CompileError(
                f"the body of a loop gets input {number} as {was} and returns it as {becomes}",
                where=where,
                hint="keep shape and dtype from iteration to iteration: x.to(dtype), or expand "
                "the first value",
                id="control-flow",
            )


def _check_predicate(results: Sequence[Tensor], where: str) -> None:
    if len(results) != 1 or results[0].numel() != 1 or results[0].dtype != torch.bool:
        types = ", ".join(str(TensorType.of(result)) for result in results)
        raise CompileError(
            f"a condition is one bool, and this is {types or 'nothing'}",
            where=where,
            hint="compare numbers: (x.sum() > 0)",
            id="control-flow",
        )


def _check_branches(then: _Traced, otherwise: _Traced, where: str) -> None:
    first, other = ([str(TensorType.of(t)) for t in branch.results] for branch in (then, otherwise))
    if first != other or then.spec != otherwise.spec:
        raise CompileError(
            f"the branches of a cond return ({', '.join(first)}) and ({', '.join(other)})",
            where=where,
            hint="return as many tensors, of the same shapes and dtypes, from both",
            id="control-flow",
        )
