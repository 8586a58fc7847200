"""Prepare a program's calls: give every value a slot in a list, so that none is found by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ipu_dynamo.program import (
    Call,
    Copy,
    Function,
    Instruction,
    Load,
    Program,
    Receive,
    Repeat,
    Store,
)
from ipu_dynamo.runtime.blame import explain
from ipu_dynamo.runtime.engines import Engine, Stage
from ipu_dynamo.runtime.streaming_memory import StreamingMemory

Moves = tuple[tuple[int, int], ...]
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
class Step:
    """A call, prepared: where its arguments lie, where its results go, which values end with it.

    `copies` are the slots of results that other IPUs have as values of their own. `loads` come
    before it and `stores` after it, as pairs of slots (from, to); `fetches` are the slots of
    variables that are off the chip.
    """

    stage: Stage
    arguments: Picker
    results: tuple[int | None, ...]
    copies: tuple[tuple[int, int], ...]
    dead: tuple[int, ...]
    call: Call
    function: Function
    memory: StreamingMemory
    loads: Moves = ()
    stores: Moves = ()
    fetches: tuple[int, ...] = ()


def sections(program: Program) -> Sections:
    """Cut a program's body at the loop over micro-batches."""
    body = program.body
    if len(body) == 1 and isinstance(body[0], Repeat) and body[0].over == "device_iteration":
        body = body[0].body
    (position,) = (i for i, instruction in enumerate(body) if isinstance(instruction, Repeat))
    loop = body[position]
    assert isinstance(loop, Repeat)
    return Sections(body[:position], loop.body, body[position + 1 :])


def number_slots(program: Program, given: Sequence[str] = ()) -> dict[str, int]:
    """A slot for every name; on one device a copy is the same tensor, so it has the same slot.

    No IPU waits for another's weight gradients, so where these are calls of their own it is not
    known who reads a value last: then a copy has a slot of its own, and each IPU drops its own.

    Args:
        given: names that get the first slots, in order; streams among them are received there.
    """
    names = given or [variable.name for variable in program.variables]
    slots = {name: slot for slot, name in enumerate(names)}
    count = len(names)
    cut = sections(program)
    loop, apart = set(cut.loop), any(call.direction == "weights" for call in program.calls)
    for instruction in cut.all:
        made: tuple[str | None, ...] = ()
        match instruction:
            case Receive(stream=stream, result=name) if stream in given:
                slots[name] = slots[stream]
            case Receive(result=name) | Store(result=name) | Load(result=name):
                made = (name,)
            case Call(results=results):
                made = results
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
) -> list[Step]:
    """The calls of a program's loop in order; a value ends with the last call that names it.

    What an IPU loads is loaded by its next call, and what it stores is stored by its last one.

    Args:
        kept: slots of values that outlive the calls.
        threads: intra-op threads of whoever runs the calls; None is torch's number.
        memory: where stored values go; None: a new one.
    """
    memory = memory or StreamingMemory()
    functions = {f.name: (f, engine.compile(f, threads)) for f in program.functions}
    loop = sections(program).loop
    calls = [i for i in loop if isinstance(i, Call)]
    loads, stores, fetches = moves_of_calls(loop, slots)
    copied: dict[int, list[int]] = {}
    for copy in loop:
        if isinstance(copy, Copy) and slots[copy.value] != slots[copy.result]:
            copied.setdefault(slots[copy.value], []).append(slots[copy.result])
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        names = (*call.arguments, *(name for name in call.results if name))
        last |= {slots[name]: index for name in names}
        last |= {slot: index for move in (*loads[index], *stores[index]) for slot in move}
    steps = []
    for index, call in enumerate(calls):
        function, stage = functions[call.function]
        arguments = picker([slots[name] for name in call.arguments])
        results = tuple(slots[name] if name else None for name in call.results)
        copies = tuple((s, to) for s in results if s is not None for to in copied.get(s, ()))
        dead = tuple(s for s, end in last.items() if end == index and s not in kept)
        moves = memory, loads[index], stores[index], fetches[index]
        steps.append(Step(stage, arguments, results, copies, dead, call, function, *moves))
    return steps


def moves_of_calls(
    loop: Sequence[Instruction], slots: dict[str, int]
) -> tuple[dict[int, Moves], dict[int, Moves], dict[int, tuple[int, ...]]]:
    """For every call the slots (from, to) of what it loads before and stores after it, and the
    slots of the variables that are loaded for it."""
    calls = [i for i in loop if isinstance(i, Call)]
    loads: dict[int, Moves] = dict.fromkeys(range(len(calls)), ())
    stores: dict[int, Moves] = dict.fromkeys(range(len(calls)), ())
    fetches: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(calls)), ())
    passed = 0
    for instruction in loop:
        if isinstance(instruction, Call):
            passed += 1
        elif isinstance(instruction, Load | Store):
            move = (slots[instruction.value], slots[instruction.result])
            same = [i for i, call in enumerate(calls) if call.ipu == instruction.ipu]
            if isinstance(instruction, Load) and move[0] == move[1]:
                fetches[passed] += move[:1]
            elif isinstance(instruction, Load):
                loads[min(i for i in same if i >= passed)] += (move,)
            else:
                stores[max(i for i in same if i < passed)] += (move,)
    return loads, stores, fetches


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
    for variable in step.fetches:
        step.memory.fetch(values[variable])
    for source, target in step.loads:
        values[target] = step.memory.load(values[source])
    try:
        results = step.stage(list(step.arguments(values)))
    except Exception as error:
        given = step.arguments(values)
        raise explain(error, step.call, step.function, given, micro_batch) from error
    for slot, result in zip(step.results, results, strict=True):
        if slot is not None:
            values[slot] = result
    for slot, copy in step.copies:
        values[copy] = values[slot]
    for source, target in step.stores:
        values[target] = step.memory.store(values[source])
    for slot in step.dead:
        values[slot] = None
