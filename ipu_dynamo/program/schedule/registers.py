"""Give every value of a program a register, so that none is found by name while it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, assert_never

import torch

from ipu_dynamo.program.ir.instructions import (
    AdjustLossScale,
    AllGather,
    AllReduce,
    Call,
    Copy,
    Instruction,
    Load,
    Plain,
    Receive,
    ReduceScatter,
    Send,
    Store,
    Update,
    on_ipu,
)
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.schedule.sections import sections


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
            case Load() | AllGather() if is_fetch(instruction):
                made = (fetched_as(instruction.value, instruction.ipu, homes, devices),)
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
            case Send() | AllGather() | ReduceScatter() | AllReduce() | Update():
                continue
            case AdjustLossScale():
                continue
            case _:
                assert_never(instruction)
        for new in made:
            if new and new not in slots:
                slots[new], count = count, count + 1
    return slots


def moves_of_calls(
    program: Program, slots: Mapping[str, int], devices: Sequence[torch.device] = ()
) -> tuple[dict[int, Moves], dict[int, Moves]]:
    """For every call the values that are loaded before and stored after it."""
    loop = sections(program).loop
    calls = [i for i in loop if isinstance(i, Call)]
    loads, stores = _no_moves(calls), _no_moves(calls)
    passed = 0
    for instruction in loop:
        match instruction:
            case Call():
                passed += 1
            case Load() if is_fetch(instruction):
                continue
            case Store(value=name, result=result, ipu=ipu):
                last = max(i for i, call in enumerate(calls) if call.ipu == ipu and i < passed)
                stores[last] += (Move(slots[name], slots[result]),)
            case Load(value=name, result=result, ipu=ipu):
                first = min(i for i, call in enumerate(calls) if call.ipu == ipu and i >= passed)
                here = devices[ipu] if devices else None
                loads[first] += (Move(slots[name], slots[result], here),)
            case Receive() | Send() | Copy() | AllGather() | ReduceScatter() | AllReduce():
                continue
            case Update() | AdjustLossScale():
                continue
            case _:
                assert_never(instruction)
    return loads, stores


def copies_of_calls(
    loop: Sequence[Plain], slots: Mapping[str, int], devices: Sequence[torch.device] = ()
) -> tuple[dict[int, Moves], dict[int, Moves]]:
    """The copies that come after each call, and those before it: the first call has some."""
    calls = [i for i in loop if isinstance(i, Call)]
    before, after = _no_moves(calls), _no_moves(calls)
    passed = 0
    for instruction in loop:
        match instruction:
            case Call():
                passed += 1
            case Copy():
                kind, index = (after, passed - 1) if passed else (before, 0)
                kind[index] += moves_of([instruction], slots, devices)
            case Receive() | Send() | Store() | Load() | AllGather() | ReduceScatter():
                continue
            case AllReduce() | Update() | AdjustLossScale():
                continue
            case _:
                assert_never(instruction)
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


def is_fetch(instruction: Instruction) -> TypeGuard[Load | AllGather]:
    """Whether an instruction brings a variable to an IPU, and not a value that was stored."""
    if isinstance(instruction, Load):
        return instruction.value == instruction.result
    return isinstance(instruction, AllGather)


def differ(ipu: int, other: int, devices: Sequence[torch.device]) -> bool:
    """Whether two IPUs have devices of their own."""
    return bool(devices) and devices[ipu] != devices[other]


def fetched_as(
    name: str, ipu: int, homes: Mapping[str, int], devices: Sequence[torch.device]
) -> str:
    """What `ipu` calls a variable that it fetches: on the device of its home, that is the same."""
    return on_ipu(name, ipu) if differ(ipu, homes[name], devices) else name
