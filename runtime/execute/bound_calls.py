"""Prepare a program's calls: give every value a slot in a list, so that none is found by name."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from ipu_dynamo.program import Call, Function, Program
from ipu_dynamo.program.schedule.registers import Moves, copies_of_calls, moves_of_calls
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import turns
from ipu_dynamo.progress import begin
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.engines.recipe import Stage
from ipu_dynamo.runtime.execute.error_attribution import explain
from ipu_dynamo.runtime.execute.fetches import Fetches, fetches_of_calls
from ipu_dynamo.runtime.execute.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.lower.constant_inputs import constant_inputs
from ipu_dynamo.runtime.lower.make_recipe import recipe_of

Picker = Callable[[list[Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Step:
    """A call, prepared: where its arguments lie, where its results go, which values end with it.

    `before` and `after` are the copies to other IPUs around it, as far as these have the value in
    a slot of their own. `loads` come before it and `stores` after it; `fetches` are of variables
    that are off the chip or in shards. `released` are given away: a call that repeats operators to
    save memory forgets such an argument after its last reader in it, not after the call.
    """

    stage: Stage
    arguments: Picker
    results: tuple[int | None, ...]
    dead: tuple[int, ...]
    call: Call
    function: Function
    memory: StreamingMemory
    released: tuple[int, ...] = ()
    loads: Moves = ()
    stores: Moves = ()
    fetches: Fetches = ()
    before: Moves = ()
    after: Moves = ()


def prepare_steps(
    program: Program,
    engine: Engine,
    slots: dict[str, int],
    kept: set[int],
    threads: int | None = None,
    memory: StreamingMemory | None = None,
    devices: Sequence[torch.device] = (),
    constants: Set[str] = frozenset(),
) -> list[Step]:
    """The calls of a program's loop in order; a value ends with the last call that names it.

    What an IPU loads is loaded by its next call, and what it stores is stored by its last one.

    Args:
        kept: slots of values that outlive the calls.
        threads: intra-op threads of whoever runs the calls; None is torch's number.
        memory: where stored values go; None: a new one.
        devices: of the IPUs, as for `number_slots`.
        constants: variables that keep their values from step to step.
    """
    memory = memory or StreamingMemory()
    stages = {}
    for number, function in enumerate(program.functions, 1):
        begin("functions", number, len(program.functions))
        kept_same = constant_inputs(function, program.calls, constants)
        recipe = recipe_of(function, engine, threads, kept_same)
        stages[function.name] = recipe, engine.compile(recipe)
    loop = sections(program).loop
    calls = [i for i in loop if isinstance(i, Call)]
    loads, stores = moves_of_calls(program, slots, devices)
    fetches = fetches_of_calls(program, loop, slots, devices)
    before, after = copies_of_calls(loop, slots, devices)
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        names = (*call.arguments, *(name for name in call.results if name))
        last |= {slots[name]: index for name in names}
        moves = (*loads[index], *stores[index], *before[index], *after[index])
        last |= {slot: index for move in moves for slot in (move.source, move.target)}
        last |= {slot: index for fetch in fetches[index] for slot in (fetch.source, fetch.target)}
    steps = []
    for index, call in enumerate(calls):
        recipe, stage = stages[call.function]
        here = {fetch.source: fetch.target for fetch in fetches[index]}
        arguments = picker([here.get(slots[name], slots[name]) for name in call.arguments])
        results = tuple(slots[name] if name else None for name in call.results)
        dead = tuple(s for s, end in last.items() if end == index and s not in kept)
        released: tuple[int, ...] = ()
        if recipe.releases:
            later = {move.source for move in (*after[index], *stores[index])}
            released = tuple({slots[name] for name in call.arguments} & {*dead} - later)
        around = loads[index], stores[index], fetches[index], before[index], after[index]
        steps.append(
            Step(stage, arguments, results, dead, call, recipe.function, memory, released, *around)
        )
    return steps


def in_turns(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps of every turn of a micro-batch."""
    given = iter(steps)
    return [[next(given) for _ in turn] for turn in turns([step.call for step in steps])]


def picker(slots: Sequence[int]) -> Picker:
    """A function that takes the values of `slots` out of a list."""
    if len(slots) == 1:
        (slot,) = slots
        return lambda values: (values[slot],)
    if not slots:
        return lambda values: ()
    return itemgetter(*slots)


def run_steps(steps: Sequence[Step], values: list[Any], micro_batch: int) -> None:
    """Run prepared calls on one list of values, and forget each value after its last reader.

    Raises:
        ExecutionError: an operator failed; it is named, with stage and source line.
    """
    for step in steps:
        run_step(step, values, micro_batch)


def run_step(step: Step, values: list[Any], micro_batch: int) -> None:
    """Run one prepared call, as `run_steps` does."""
    for fetch in step.fetches:
        fetch(values, step.memory)
    for move in step.loads:
        values[move.target] = step.memory.load(values[move.source], move.device)
    for move in step.before:
        move(values)
    arguments = list(step.arguments(values))
    for released in step.released:
        values[released] = None
    try:
        results = step.stage(arguments)
    except Exception as error:
        given = None if step.released else step.arguments(values)
        raise explain(error, step.call, step.function, given, micro_batch) from error
    for slot, result in zip(step.results, results, strict=True):
        if slot is not None:
            values[slot] = result
    for move in step.after:
        move(values)
    for move in step.stores:
        values[move.target] = step.memory.store(values[move.source])
    for dead in step.dead:
        values[dead] = None
