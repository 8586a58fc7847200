"""Prepare a program's calls: give every value a slot in a list, so that none is found by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from ipu_dynamo.program import Call, Copy, Function, Instruction, Program, Receive, Repeat
from ipu_dynamo.runtime.blame import explain
from ipu_dynamo.runtime.engines import Engine, Stage

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
    """Bring the value in slot `source` to another torch device, into slot `target`."""

    source: int
    target: int
    device: torch.device

    def __call__(self, values: list[Any]) -> None:
        values[self.target] = values[self.source].to(self.device)


@dataclass(frozen=True, slots=True)
class Step:
    """A call, prepared: where its arguments lie, where its results go, which values end with it.

    `before` and `after` are the moves to other devices around it.
    """

    stage: Stage
    arguments: Picker
    results: tuple[int | None, ...]
    dead: tuple[int, ...]
    call: Call
    function: Function
    before: tuple[Move, ...] = ()
    after: tuple[Move, ...] = ()


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

    Args:
        given: names that get the first slots, in order; streams among them are received there.
        devices: of the IPUs; none: they share one.
    """
    names = given or [variable.name for variable in program.variables]
    slots = {name: slot for slot, name in enumerate(names)}
    count = len(names)
    for instruction in sections(program).all:
        made: tuple[str | None, ...] = ()
        match instruction:
            case Receive(stream=stream, result=name) if stream in given:
                slots[name] = slots[stream]
            case Receive(result=name):
                made = (name,)
            case Call(results=results):
                made = results
            case Copy(value=value, result=name, src=src, dst=dst):
                if devices and devices[src] != devices[dst]:
                    made = (name,)
                else:
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
    devices: Sequence[torch.device] = (),
) -> list[Step]:
    """The calls of a program's loop in order; a value ends with the last call that names it.

    Args:
        kept: slots of values that outlive the calls.
        threads: intra-op threads of whoever runs the calls; None is torch's number.
        devices: of the IPUs, as for `number_slots`.
    """
    functions = {f.name: (f, engine.compile(f, threads)) for f in program.functions}
    calls: list[Call] = []
    moved: dict[int, list[Move]] = {}  # index of the call that they follow -> moves
    last: dict[int, int] = {}
    for instruction in sections(program).loop:
        if isinstance(instruction, Call):
            call = instruction
            names = (*call.arguments, *(name for name in call.results if name))
            last |= {slots[name]: len(calls) for name in names}
            calls.append(call)
        elif isinstance(instruction, Copy):
            moves = moves_of([instruction], slots, devices)
            moved.setdefault(len(calls) - 1, []).extend(moves)
            last |= {s: max(0, len(calls) - 1) for m in moves for s in (m.source, m.target)}
    steps = []
    for index, call in enumerate(calls):
        function, stage = functions[call.function]
        arguments = picker([slots[name] for name in call.arguments])
        results = tuple(slots[name] if name else None for name in call.results)
        dead = tuple(s for s, end in last.items() if end == index and s not in kept)
        before = tuple(moved.get(-1, ())) if index == 0 else ()
        after = tuple(moved.get(index, ()))
        steps.append(Step(stage, arguments, results, dead, call, function, before, after))
    return steps


def moves_of(
    instructions: Sequence[Instruction], slots: dict[str, int], devices: Sequence[torch.device]
) -> list[Move]:
    """What copies between IPUs do where these have devices of their own."""
    return [
        Move(slots[i.value], slots[i.result], devices[i.dst])
        for i in instructions
        if isinstance(i, Copy) and slots[i.value] != slots[i.result]
    ]


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
    for move in step.before:
        move(values)
    try:
        results = step.stage(list(step.arguments(values)))
    except Exception as error:
        given = step.arguments(values)
        raise explain(error, step.call, step.function, given, micro_batch) from error
    for slot, result in zip(step.results, results, strict=True):
        if slot is not None:
            values[slot] = result
    for move in step.after:
        move(values)
    for slot in step.dead:
        values[slot] = None
