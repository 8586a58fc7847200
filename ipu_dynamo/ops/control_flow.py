"""Define the operators that loop and branch: `ipu::loop`, `ipu::while_loop` and `ipu::branch`.

    (carried, stacked) = loop(carried, scanned, captured, count, body, reverse)
    carried            = while_loop(carried, captured, condition, body)
    results            = branch(predicate, captured, then, otherwise)

The body of a loop takes the carried tensors, a row of each scanned tensor, and the captured
tensors. It returns the next carried tensors, and rows to be stacked. `for_loop` is a loop that
scans nothing, `map` one that carries nothing. The gradient of a loop is a loop in reverse order.
Bodies are named, see `bodies.py`; an engine calls `run_...` with code of its own for them. All
operators are functional: results are dense and share no memory with an argument.

`ipu::control_flow(tensors, handle)` stands for all of them in graphs before autograd.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.bodies import BODIES, Body, bodies_of, body_named, empties

Step = Callable[[list[Tensor]], Sequence[Any]]

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define(
    "loop(Tensor[] carried, Tensor[] scanned, Tensor[] captured, int count, str body, "
    "bool reverse=False) -> Tensor[]"
)
_library.define(
    "while_loop(Tensor[] carried, Tensor[] captured, str condition, str body) -> Tensor[]"
)
_library.define("branch(Tensor predicate, Tensor[] captured, str then, str otherwise) -> Tensor[]")
_library.define("control_flow(Tensor[] tensors, int handle) -> Tensor[]")
control_flow_op = torch.ops.ipu.control_flow.default
loop_op = torch.ops.ipu.loop.default
while_loop_op = torch.ops.ipu.while_loop.default
branch_op = torch.ops.ipu.branch.default
# where the names of its bodies begin and end among an operator's arguments
_NAMES: dict[object, tuple[int, int]] = {
    loop_op: (4, 5),
    while_loop_op: (2, 4),
    branch_op: (2, 4),
}
CONTROL_FLOW = frozenset(_NAMES)
FLOW = "ipu.flow"  # key of the meta of `control_flow_op`: the loop or branch of its handle


class Flow(Protocol):
    """A loop or branch before autograd."""

    @property
    def results(self) -> list[Tensor]:
        """Tensors of the types that it gives, of whichever mode is entered."""
        ...


_flows: "WeakValueDictionary[int, Flow]" = WeakValueDictionary()
_handles = itertools.count()


def register_flow(flow: Flow) -> int:
    """Make a loop or branch known by a handle, as long as it is referenced."""
    handle = next(_handles)
    _flows[handle] = flow
    return handle


def flow_of(handle: int) -> Flow:
    """The loop or branch of a handle."""
    return _flows[handle]


def names_of(node: fx.Node) -> tuple[str, ...]:
    """The bodies that a node names; none, where it is no loop and no branch."""
    place = _NAMES.get(node.target)
    return () if place is None else tuple(map(str, node.args[slice(*place)]))


def rename(node: fx.Node, bodies: Sequence[Body]) -> None:
    """Let a node run other bodies."""
    start, stop = _NAMES[node.target]
    node.args = (*node.args[:start], *(body.name for body in bodies), *node.args[stop:])
    node.meta[BODIES] = tuple(bodies)


def hold_bodies(graph: fx.Graph, named: Callable[[str], Body] = body_named) -> None:
    """Let nodes that were made without it hold the bodies that they name."""
    for node in graph.nodes:
        if (names := names_of(node)) and not bodies_of(node):
            node.meta[BODIES] = tuple(map(named, names))


def run_loop(
    step: Step,
    results: Sequence[Tensor],
    carried: Sequence[Tensor],
    scanned: Sequence[Tensor],
    captured: Sequence[Tensor],
    count: int,
    reverse: bool = False,
) -> list[Tensor]:
    """Run a loop whose iterations `step` computes.

    Args:
        step: takes a list of arguments, which it may empty.
        results: tensors of the types that the body returns.
    """
    state: list[Tensor] = [tensor.contiguous() for tensor in carried]
    fixed = [tensor.contiguous() for tensor in captured]
    rows = [tensor.contiguous().unbind(0) for tensor in scanned]
    stacked = empties(tuple(results[len(state) :]), (count,))
    places = [tensor.unbind(0) for tensor in stacked]
    number = len(state)
    for index in reversed(range(count)) if reverse else range(count):
        made = step([*state, *[tensor[index] for tensor in rows], *fixed])
        state = list(made[:number])
        for place, value in zip(places, made[number:], strict=True):
            place[index].copy_(value)
    return [*_own_memory(state, [*carried, *scanned, *captured]), *stacked]


def run_while(
    holds: Step, step: Step, carried: Sequence[Tensor], captured: Sequence[Tensor]
) -> list[Tensor]:
    """Run `step` as long as the one element that `holds` gives is true."""
    state: list[Tensor] = [tensor.contiguous() for tensor in carried]
    fixed = [tensor.contiguous() for tensor in captured]
    while holds([*state, *fixed])[0]:
        state = list(step([*state, *fixed]))
    return _own_memory(state, [*carried, *captured])


def run_branch(
    then: Step, otherwise: Step, predicate: Tensor, captured: Sequence[Tensor]
) -> list[Tensor]:
    """Run one of two."""
    chosen = then if predicate else otherwise
    return _own_memory(chosen([tensor.contiguous() for tensor in captured]), captured)


def bound(node: fx.Node, steps: Mapping[str, Step]) -> Callable[..., list[Tensor]]:
    """Make a function of a loop or branch, on its tensor arguments.

    Args:
        steps: a function for each body, by the body's name.
    """
    bodies = bodies_of(node)
    chosen = [steps[body.name] for body in bodies]
    if node.target is loop_op:
        results = bodies[0].results

        def loop(
            carried: list[Tensor],
            scanned: list[Tensor],
            captured: list[Tensor],
            count: int,
            body: str,
            reverse: bool = False,
        ) -> list[Tensor]:
            return run_loop(chosen[0], results, carried, scanned, captured, count, reverse)

        return loop
    if node.target is while_loop_op:

        def while_loop(
            carried: list[Tensor], captured: list[Tensor], condition: str, body: str
        ) -> list[Tensor]:
            return run_while(chosen[0], chosen[1], carried, captured)

        return while_loop

    def branch(
        predicate: Tensor, captured: list[Tensor], then: str, otherwise: str
    ) -> list[Tensor]:
        return run_branch(chosen[0], chosen[1], predicate, captured)

    return branch


def _own_memory(values: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """`values`, dense, and copies of those that lie in memory that is taken."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in given}
    made = []
    for value in values:
        memory = value.untyped_storage().data_ptr()
        made.append(value.clone() if memory in taken else value.contiguous())
        taken.add(memory)
    return made


def _step(body: Body) -> Step:
    """The body as PyTorch runs its graph, operator by operator."""
    return lambda arguments: body.graph(*arguments)


def _loop(
    carried: Sequence[Tensor],
    scanned: Sequence[Tensor],
    captured: Sequence[Tensor],
    count: int,
    body: str,
    reverse: bool = False,
) -> list[Tensor]:
    runs = body_named(body)
    return run_loop(_step(runs), runs.results, carried, scanned, captured, count, reverse)


def _while_loop(
    carried: Sequence[Tensor], captured: Sequence[Tensor], condition: str, body: str
) -> list[Tensor]:
    return run_while(_step(body_named(condition)), _step(body_named(body)), carried, captured)


def _branch(
    predicate: Tensor, captured: Sequence[Tensor], then: str, otherwise: str
) -> list[Tensor]:
    return run_branch(_step(body_named(then)), _step(body_named(otherwise)), predicate, captured)


def _loop_shapes(
    carried: Sequence[Tensor],
    scanned: Sequence[Tensor],
    captured: Sequence[Tensor],
    count: int,
    body: str,
    reverse: bool = False,
) -> list[Tensor]:
    results, number = body_named(body).results, len(carried)
    return [*empties(results[:number]), *empties(results[number:], (count,))]


def _while_shapes(
    carried: Sequence[Tensor], captured: Sequence[Tensor], condition: str, body: str
) -> list[Tensor]:
    return empties(body_named(body).results)


def _branch_shapes(
    predicate: Tensor, captured: Sequence[Tensor], then: str, otherwise: str
) -> list[Tensor]:
    return empties(body_named(then).results)


def _flow_shapes(tensors: Sequence[Tensor], handle: int) -> list[Tensor]:
    return flow_of(handle).results


torch.library.register_fake("ipu::control_flow", _flow_shapes, lib=_library)
_IMPLEMENTATIONS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("loop", _loop, _loop_shapes),
    ("while_loop", _while_loop, _while_shapes),
    ("branch", _branch, _branch_shapes),
)
for _name, _run, _shapes in _IMPLEMENTATIONS:
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ipu::{_name}", _shapes, lib=_library)
