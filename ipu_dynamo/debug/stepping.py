"""Run a program call by call, and compare each call's results with the expected ones."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.debug.mismatch import Values
from ipu_dynamo.debug.snapshots import NAME, Snapshot, arguments
from ipu_dynamo.debug.values import differ, kept
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.options import Options
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.levels import Part, Partitioned
from ipu_dynamo.passes.pipeline import recipe_of
from ipu_dynamo.program import (
    Accumulate,
    Call,
    Function,
    Program,
    Write,
    WriteBuffer,
    graph_outputs,
    make_function,
)
from ipu_dynamo.program.ir import made_names
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.engines.engines import EagerEngine, Engine
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.engines.stage_key import keyed


@dataclass(frozen=True)
class WrongCall:
    """A call with a result, or a variable that it writes, that is not as expected.

    Args:
        given: its arguments, before the call.
        name: of the wrong value.
        found, expected: that value.
        engine: the fault is the engine's: its value differs from that of the function's operators.
    """

    call: Call
    function: Function
    given: Sequence[Tensor]
    name: str
    found: Tensor
    expected: Tensor
    engine: bool


def expected_values(capture: Joint, last: Snapshot, values: Values) -> dict[str, Tensor]:
    """The expected value of each name in the program, from the graph that it was made of."""
    expected: dict[str, Tensor] = {}
    for node in capture.graph.graph.nodes:
        value = values.get(last.by_name.get(node.meta.get(NAME), node))
        if isinstance(value, Tensor):
            expected[node.name] = value
    for made, role in last.outputs:
        if made is not None and role.kind == "gradient":
            expected[made_names.accumulator(role.name)] = values[made]
        elif made is not None and role.kind == "mutation":
            expected[f"{role.name} after"] = values[made]
    return expected


def first_wrong_call(
    program: Program,
    engine: Engine,
    last: Snapshot,
    given: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    rtol: float | None,
) -> WrongCall | None:
    """Run one micro-batch on `engine`; return the first call with an unexpected result."""
    values = _first_values(program, last, given)
    sums = {variable.name for variable in program.variables if variable.kind == "accumulator"}
    ends = {name: call for call in program.calls for name in sums.intersection(call.arguments)}
    for call, function, stage in _calls(program, engine, values):
        before = [kept(values[name]) for name in call.arguments]
        results = stage([values[name] for name in call.arguments])
        named = [(n, r) for n, r in zip(call.results, results, strict=True) if n and r is not None]
        values |= named
        arguments_before = dict(zip(call.arguments, before, strict=True))
        known = {n: v for n, v in expected.items() if ends.get(n, call) is call}  # sums are whole
        for name, found, value in _compared(dict(named), arguments_before, values, known):
            if differ(found, value, rtol):
                return WrongCall(
                    call, function, before, name, kept(found), value,
                    engine=_engine_differs(function, before, found, name, call, rtol),
                )  # fmt: skip
    return None


def step_of_wrong_call(
    steps: Sequence[tuple[str, Partitioned]],
    programs: Sequence[tuple[str, Program]],
    last: Snapshot,
    given: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    rtol: float | None,
) -> str:
    """Name the first pass after which a function computes an unexpected value.

    Args:
        steps: the stages' graphs after each pass, with its name.
        programs: the program, and then its host programs, after each pass.
    """
    _, program = programs[0]
    for name, partitioned in steps:
        values = _first_values(program, last, given)
        values |= {stream.name: values[f"host.{stream.name}"] for stream in program.inputs}
        ends = {write.target: part.graph for part in partitioned.parts for write in part.writes}
        for part in partitioned.parts:
            targets = [write.target for write in part.writes]
            before = {n: kept(values[n]) for n in (*part.inputs, *targets)}
            with torch.no_grad():
                results = fx.Interpreter(part.graph).run(*[values[n] for n in part.inputs])
            named = dict(zip(part.outputs, results, strict=True))
            values |= named
            apply_writes(part, values)
            known = {n: v for n, v in expected.items() if ends.get(n, part.graph) is part.graph}
            for _, found, value in _compared(named, before, values, known):
                if differ(found, value, rtol):
                    return name
    for name, program in programs:
        if first_wrong_call(program, EagerEngine(), last, given, expected, rtol) is not None:
            return name
    return programs[-1][0]


def apply_writes(part: Part, values: Mapping[str, Tensor]) -> None:
    """Carry out a part's writes; `values` have its results, and the variables."""
    _write(values, [Write(w.target, w.value, w.rule, w.weight) for w in part.writes])


def _write(values: Mapping[str, Tensor], writes: Sequence[Write]) -> None:
    given = [kept(values[write.value]) for write in writes]  # buffers are written all at once
    with torch.no_grad():
        for write, value in zip(writes, given, strict=True):
            target = values[write.target]
            if write.rule == "+=":
                target.add_(value)
            elif write.weight is not None:
                target.lerp_(value, values[write.weight].type_as(target))
            else:
                target.copy_(value)


def _compared(
    results: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """List the values that a call returns or writes: name, value, and expected value.

    Args:
        before: its arguments before the call.
    """
    for name, result in results.items():
        if (value := expected.get(made_names.value_of(name))) is not None:
            yield name, result, value
    for name in before:
        if made_names.parameter_of(name) != name and name in expected:
            yield name, values[name], expected[name]
    for name, old in before.items():
        if f"{name} after" in expected and not torch.equal(old, values[name]):
            yield name, values[name], expected[f"{name} after"]


def first_wrong_operator(
    wrong: WrongCall, engine: Engine, rtol: float | None
) -> tuple[fx.Node, Tensor, Tensor] | None:
    """The first operator of a function with a wrong value on the engine; found and expected.

    One compilation makes all operators results of the function. This may hide the fault, as the
    engine then keeps values that it overwrote before. If so, a binary search makes one operator at
    a time the result. None if that finds nothing either.
    """
    watched = [node for node in wrong.function.operators if _gives_new_tensor(node)]
    for node, found, expected in _computed(wrong, engine, watched):
        if differ(found, expected, rtol):
            return node, found, expected
    result = result_node(wrong.function, wrong.call, wrong.name)
    first, last = 0, watched.index(result) if result in watched else -1
    answer = None
    while first <= last:
        middle = (first + last) // 2
        ((node, found, expected),) = _computed(wrong, engine, [watched[middle]])
        if differ(found, expected, rtol):
            answer, last = (node, found, expected), middle - 1
        else:
            first = middle + 1
    return answer


def _computed(
    wrong: WrongCall, engine: Engine, watched: Sequence[fx.Node]
) -> list[tuple[fx.Node, Tensor, Tensor]]:
    """Compute some operators as results of a function, on the engine and by eager PyTorch."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(wrong.function.graph.graph, copies)
    graph.output(tuple(copies[node] for node in watched)).meta["val"] = None
    graph.eliminate_dead_code()
    function = make_function("watched", fx.GraphModule(torch.nn.Module(), graph))
    with torch.no_grad():
        found = _stage_of(function, engine)(list(map(kept, wrong.given)))
        expected = _stage_of(function, EagerEngine())(list(map(kept, wrong.given)))
    return [
        (node, ours, theirs)
        for node, ours, theirs in zip(watched, found, expected, strict=True)
        if ours is not None and theirs is not None
    ]


def _calls(
    program: Program, engine: Engine, values: dict[str, Tensor]
) -> Iterator[tuple[Call, Function, Stage]]:
    """Carry out moves and writes of a program, and stop at each call.

    The runtime's interpreter would not do: it runs only host programs, after `InlineWrites`, and
    would hide a fault of that pass, or one of its own. Values are looked up by their names here.
    """
    functions = {f.name: (f, _stage_of(f, engine)) for f in program.functions}
    parts = sections(program)
    with torch.no_grad():
        for instruction in (*parts.before, *parts.loop):
            if isinstance(instruction, Call):
                yield instruction, *functions[instruction.function]
            elif instruction.makes and "loop" in instruction.sections:
                raise CompileError(
                    f"replicas exchange tensors, and one of them is stepped through: {instruction}",
                    hint="debug the model without collectives",
                    id="collective",
                )
            for move in instruction.moves:  # between replicas nothing: this is one
                if move.dst != "host":
                    origin = f"host.{move.value}" if move.src == "host" else move.value
                    values[move.result] = values[origin]
            if isinstance(instruction, Accumulate | WriteBuffer):
                _write(values, instruction.written)


def _first_values(
    program: Program, last: Snapshot, given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors of variables, and of the streams as `host.NAME`."""
    held = {
        role.name: tensor
        for role, tensor in zip(last.roles.values(), arguments(last, given), strict=True)
    }
    held = {**given, **held}  # inputs that the cut into stages adds are only in `given`
    values = {f"host.{stream.name}": held[stream.name] for stream in program.inputs}
    for variable in program.variables:
        if variable.kind == "accumulator":
            parameter = made_names.parameter_of(variable.name)
            like = held.get(parameter, torch.zeros(variable.type.shape))
            values[variable.name] = torch.zeros_like(like, dtype=variable.type.dtype)
        elif variable.name in held or variable.kind != "loss_scale":
            values[variable.name] = held[variable.name]
    return values


def _stage_of(function: Function, engine: Engine) -> Stage:
    """The callable that an engine makes of a function."""
    (stage,) = engine.compile([keyed(recipe_of(function, Options(), Machine(engine.name)))])
    return stage


def _engine_differs(
    function: Function,
    before: Sequence[Tensor],
    found: Tensor,
    name: str,
    call: Call,
    rtol: float | None,
) -> bool:
    """Whether eager PyTorch gives another value for the same function and arguments."""
    given = list(map(kept, before))
    with torch.no_grad():
        results = _stage_of(function, EagerEngine())(list(given))
    eager = dict(zip(call.arguments, given, strict=True)) | dict(
        zip(call.results, results, strict=True)
    )
    return differ(found, eager[name], rtol)


def _gives_new_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and not writes(node)


def result_node(function: Function, call: Call, name: str) -> fx.Node | None:
    """The operator of a function that gives the call's result `name`, or writes it."""
    if name in call.results:
        made = graph_outputs(function.graph)[call.results.index(name)]
        return made if isinstance(made, fx.Node) else None
    placeholders = function.graph.graph.find_nodes(op="placeholder")
    written = list(placeholders)[call.arguments.index(name)]
    return next(reversed(list(written.users)), None)
