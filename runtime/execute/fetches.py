"""Prepare what brings variables to the calls that read them: from off the chip, or from shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ipu_dynamo.program import Call, Gather, Instruction, Program
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
    loop: Sequence[Instruction],
    slots: Mapping[str, int],
    devices: Sequence[torch.device] = (),
) -> dict[int, Fetches]:
    """For every call of a program's loop the variables that are loaded and gathered for it."""
    variables = {variable.name: variable for variable in program.variables}
    homes = {variable.name: variable.ipu for variable in program.variables}
    found: dict[int, Fetches] = dict.fromkeys(range(sum(isinstance(i, Call) for i in loop)), ())
    passed = 0
    for instruction in loop:
        if isinstance(instruction, Call):
            passed += 1
        elif is_fetch(instruction):
            name, ipu = instruction.value, instruction.ipu
            target, shards = slots[fetched_as(name, ipu, homes, devices)], variables[name].shards
            if isinstance(instruction, Gather):  # at home, or after it was loaded
                fetch = Fetch(target, target, shards, gathered=True)
            else:
                device = devices[ipu] if differ(ipu, homes[name], devices) else None
                fetch = Fetch(slots[name], target, shards, gathered=False, device=device)
            found[passed] += (fetch,)
    return found
