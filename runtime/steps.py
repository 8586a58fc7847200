"""Prepare a program's calls: give every value a slot in a list, so that none is found by name."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from ipu_dynamo.program import (
    RECOMPUTED,
    Call,
    Copy,
    Function,
    Gather,
    Instruction,
    Load,
    Program,
    Receive,
    Repeat,
    Store,
)
from ipu_dynamo.program.turns import turns
from ipu_dynamo.runtime.blame import explain
from ipu_dynamo.runtime.engines import Engine, Stage
from ipu_dynamo.runtime.fetches import (
    Fetches,
    differ,
    fetched_as,
    fetches_of_calls,
    is_fetch,
)
from ipu_dynamo.runtime.packing import constant_inputs
from ipu_dynamo.runtime.streaming_memory import StreamingMemory

Picker = Callable[[list[Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Sections:
    """What is done before, in, and after the micro-batches of a step."""

    before: tuple[Instruction, ...]
    loop: tuple[Instruction, ...]
    after: tuple[Instruction, ...]

    @property
    def all(self) -> tuple[Instruction, ...]:
        return (*self.before, *self.loop, *self.after)


@dataclass(frozen=True, slots=True)
class Move:
    """Bring the value in slot `source` to slot `target`: the same tensor, or one on `device`."""

    source: int
    target: int
    device: torch.device | None = None

    def __call__(self, values: list[Any]) -> None:
        value = values[self.source]
        values[self.target] = value if self.device is None else value.to(self.device)


Moves = tuple[Move, ...]


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


def sections(program: Program) -> Sections:
    """Cut a program's body at the loop over micro-batches."""
    body = program.body
    if len(body) == 1 and isinstance(body[0], Repeat) and body[0].over == "device_iteration":
        body = body[0].body
    (position,) = (i for i, instruction in enumerate(body) if isinstance(instruction, Repeat))
    loop = body[position]
    assert isinstance(loop, Repeat)
    return Sections(body[:position], loop.body, body[position + 1 :])


def number_slots(
    program: Program, given: Sequence[str] = (), devices: Sequence[torch.device] = ()
) -> dict[str, int]:
    """A slot for every name; on one device a copy is the same tensor, so it has the same slot.

    No IPU waits for another's weight gradients, so where these are calls of their own it is not
    known who reads a value last: then a copy has a slot of its own, and each IPU drops its own.

    Args:
        given: names that get the first slots, in order; streams among them are received there.
        devices: of the IPUs; none: they share one.
    """
    names = given or [variable.name for variable in program.variables]
    slots = {name: slot for slot, name in enumerate(names)}
    count = len(names)
    homes = {variable.name: variable.ipu for variable in program.variables}
    cut = sections(program)
    loop, apart = set(cut.loop), any(call.direction == "weights" for call in program.calls)
    for instruction in cut.all:
        made: tuple[str | None, ...] = ()
        match instruction:
            case Receive(stream=stream, result=name) if stream in given:
                slots[name] = slots[stream]
            case Load(value=name, ipu=ipu) | Gather(value=name, ipu=ipu) if is_fetch(instruction):
                made = (fetched_as(name, ipu, homes, devices),)
            case Receive(result=name) | Store(result=name) | Load(result=name):
                made = (name,)
            case Call(results=results):
                made = results
            case Copy(result=name, src=src, dst=dst) if differ(src, dst, devices):
                made = (name,)
            case Copy(result=name) if apart and instruction in loop:
                made = (name,)
            case Copy(value=value, result=name):
                slots[name] = slots[value]
        for new in made:
            if new and new not in slots:
                slots[new], count = count, count + 1
    return slots


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
    functions = {
        f.name: (f, engine.compile(f, threads, constant_inputs(f, program.calls, constants)))
        for f in program.functions
    }
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
        function, stage = functions[call.function]
        here = {fetch.source: fetch.target for fetch in fetches[index]}
        arguments = picker([here.get(slots[name], slots[name]) for name in call.arguments])
        results = tuple(slots[name] if name else None for name in call.results)
        dead = tuple(s for s, end in last.items() if end == index and s not in kept)
        released: tuple[int, ...] = ()
        if any(node.meta.get(RECOMPUTED) for node in function.operators):
            later = {move.source for move in (*after[index], *stores[index])}
            released = tuple({slots[name] for name in call.arguments} & {*dead} - later)
        around = loads[index], stores[index], fetches[index], before[index], after[index]
        steps.append(
            Step(stage, arguments, results, dead, call, function, memory, released, *around)
        )
    return steps


def in_turns(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps of every turn of a micro-batch."""
    given = iter(steps)
    return [[next(given) for _ in turn] for turn in turns([step.call for step in steps])]


def moves_of_calls(
    program: Program, slots: Mapping[str, int], devices: Sequence[torch.device] = ()
) -> tuple[dict[int, Moves], dict[int, Moves]]:
    """For every call the values that are loaded before and stored after it."""
    loop = sections(program).loop
    calls = [i for i in loop if isinstance(i, Call)]
    loads, stores = _no_moves(calls), _no_moves(calls)
    passed = 0
    for instruction in loop:
        if isinstance(instruction, Call):
            passed += 1
        elif isinstance(instruction, Load | Store) and not is_fetch(instruction):
            name, ipu = instruction.value, instruction.ipu
            here = devices[ipu] if devices else None
            same = [i for i, call in enumerate(calls) if call.ipu == ipu]
            if isinstance(instruction, Store):
                move = Move(slots[name], slots[instruction.result])
                stores[max(i for i in same if i < passed)] += (move,)
            else:
                move = Move(slots[name], slots[instruction.result], here)
                loads[min(i for i in same if i >= passed)] += (move,)
    return loads, stores


def copies_of_calls(
    loop: Sequence[Instruction], slots: Mapping[str, int], devices: Sequence[torch.device] = ()
) -> tuple[dict[int, Moves], dict[int, Moves]]:
    """The copies that come after each call, and those before it: the first call has some."""
    calls = [i for i in loop if isinstance(i, Call)]
    before, after = _no_moves(calls), _no_moves(calls)
    passed = 0
    for instruction in loop:
        if isinstance(instruction, Call):
            passed += 1
        elif isinstance(instruction, Copy):
            kind, index = (after, passed - 1) if passed else (before, 0)
            kind[index] += moves_of([instruction], slots, devices)
    return before, after


def moves_of(
    instructions: Sequence[Instruction],
    slots: Mapping[str, int],
    devices: Sequence[torch.device] = (),
) -> Moves:
    """What copies between IPUs do whose results have slots of their own."""
    return tuple(
        Move(
            slots[i.value],
            slots[i.result],
            devices[i.dst] if differ(i.src, i.dst, devices) else None,
        )
        for i in instructions
        if isinstance(i, Copy) and slots[i.value] != slots[i.result]
    )


def _no_moves(calls: Sequence[Call]) -> dict[int, Moves]:
    return dict.fromkeys(range(len(calls)), ())


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
