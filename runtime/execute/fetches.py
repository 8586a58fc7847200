"""Prepare what brings variables to the calls that read them: from off the chip, or from shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import torch

from ipu_dynamo.program import (
    AdjustLossScale,
    AllGather,
    AllReduce,
    Call,
    Copy,
    Load,
    Plain,
    Program,
    Receive,
    ReduceScatter,
    Send,
    Store,
    Update,
)
from ipu_dynamo.program.schedule.registers import differ, fetched_as, is_fetch
from ipu_dynamo.runtime.execute.streaming_memory import StreamingMemory


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the variable in slot `source` to slot `target`: the same tensor, or one on `device`.

    It comes from off the chip, `shards` being that of the variable; or it is gathered.
    """

    source: int
    target: int
    shards: int
    gathered: bool
    device: torch.device | None = None

    def __call__(self, values: list[Any], memory: StreamingMemory) -> None:
        value = values[self.source]
        (memory.gather if self.gathered else memory.fetch)(value, self.shards)
        values[self.target] = value if self.device is None else value.to(self.device)


Fetches = tuple[Fetch, ...]


def fetches_of_calls(
    program: Program,
    loop: Sequence[Plain],
    slots: Mapping[str, int],
    devices: Sequence[torch.device] = (),
) -> dict[int, Fetches]:
    """For every call of a program's loop the variables that are loaded and gathered for it."""
    variables = {variable.name: variable for variable in program.variables}
    homes = {variable.name: variable.ipu for variable in program.variables}
    found: dict[int, Fetches] = dict.fromkeys(range(sum(isinstance(i, Call) for i in loop)), ())
    passed = 0
    for instruction in loop:
        match instruction:
            case Call():
                passed += 1
            case AllGather(value=name, ipu=ipu):  # at home, or after it was loaded
                target = slots[fetched_as(name, ipu, homes, devices)]
                fetch = Fetch(target, target, variables[name].shards, gathered=True)
                found[passed] += (fetch,)
            case Load(value=name, ipu=ipu) if is_fetch(instruction):
                target = slots[fetched_as(name, ipu, homes, devices)]
                device = devices[ipu] if differ(ipu, homes[name], devices) else None
                shards = variables[name].shards
                found[passed] += (
                    Fetch(slots[name], target, shards, gathered=False, device=device),
                )
            case Receive() | Send() | Copy() | Store() | Load() | ReduceScatter() | AllReduce():
                continue
            case Update() | AdjustLossScale():
                continue
            case _:
                assert_never(instruction)
    return found
