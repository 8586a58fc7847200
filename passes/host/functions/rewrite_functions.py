"""Rewrite copies of a HostProgram's functions; those of the program stay as they are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from torch import fx

from ipu_dynamo.passes.graph.extract import copy_of
from ipu_dynamo.program import Call, Decision, Function, HostProgram, Program
from ipu_dynamo.program.ir.function import make_function, with_bodies


def rewrite_functions(
    host: HostProgram,
    rewrite: Callable[[fx.Graph], None],
    plan: Callable[[fx.Graph], object],
    decision: Decision,
) -> HostProgram | bool:
    """The HostProgram whose functions are rewritten where there is a plan; False: nowhere.

    Args:
        rewrite: changes a copy of a function's graph in place.
        plan: reads a function's graph only, and returns the rewrites to do there.
        decision: the decision for each of them.
    """
    functions: dict[str, Function] = {}
    decisions: list[Decision] = []
    for function in host.inlined.functions:
        if planned := plan(function.graph.graph):
            count = len(planned) if isinstance(planned, tuple | list) else 1
            decisions.append(replace(decision, function=function.name, count=count))
            module = copy_of(function.graph)
            rewrite(module.graph)
            module.recompile()
            functions[function.name] = make_function(function.name, module)
    if not functions:
        return False
    calls = {
        number: [(call, functions.get(call.function) or host.inlined.function(call.function))]
        for number, call in host.inlined.numbered_calls().items()
    }
    return replace(host, inlined=with_functions(host.inlined, calls)).deciding(*decisions)


def with_functions(
    program: Program,
    calls: Mapping[int, Sequence[tuple[Call, Function]]],
    without: Iterable[int] = (),
) -> Program:
    """A program whose calls have other functions; equal ones are one, and keep a name of theirs.

    Args:
        calls: by the number of each call its replacements: calls with their functions.
        without: numbers of instructions that are left out.
    """
    by_key: dict[str, Function] = {}

    def renamed(call: Call, function: Function) -> Call:
        if function.key not in by_key:
            name = _free(function.name, {known.name for known in by_key.values()})
            by_key[function.key] = replace(function, name=name)
        return replace(call, function=by_key[function.key].name)

    new: dict[int, list[Call]] = {number: [] for number in without}
    new |= {number: [renamed(*pair) for pair in pairs] for number, pairs in sorted(calls.items())}
    return replace(program.with_instructions(new), functions=with_bodies(by_key.values()))


def _free(name: str, taken: set[str]) -> str:
    """`name`, or with a number if another function has it."""
    if name not in taken:
        return name
    return next(new for number in count(2) if (new := f"{name}_{number}") not in taken)
