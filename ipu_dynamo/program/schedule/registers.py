"""Give every value of a program a register, so that the runtime needs no look-up by name."""

from collections.abc import Mapping, Sequence

import torch

from ipu_dynamo.program.ir.instructions import Copy, Receive
from ipu_dynamo.program.ir.made_names import on_ipu
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.schedule.sections import sections


def number_registers(
    program: Program, arguments: Sequence[str] = (), devices: Sequence[torch.device] = ()
) -> dict[str, int]:
    """A register for every name; on one device a copy is the same tensor, and in the same register.

    No IPU waits for another's weight gradients. So if these are calls of their own, the last reader
    of a value is not known. Then a copy has a register of its own, and each IPU drops its own.

    Args:
        arguments: get the first registers, in order; streams among them are received there.
        devices: of the IPUs; none: they share one.
    """
    names = arguments or [variable.name for variable in program.variables]
    registers = {name: register for register, name in enumerate(names)}
    count = len(names)
    owners = {variable.name: variable.ipu for variable in program.variables}
    cut = sections(program)
    splits = any(call.direction == "weights" for call in program.calls)
    loop = range(len(cut.before), len(cut.before) + len(cut.loop))
    for place, instruction in enumerate(cut.all):
        if fetched := instruction.fetches:
            (ipu,) = instruction.ipus
            defined: tuple[str, ...] = (fetched_as(fetched, ipu, owners, devices),)
        else:
            defined = instruction.made_names
        if isinstance(instruction, Receive) and instruction.stream in arguments:
            registers[instruction.result] = registers[instruction.stream]
        elif isinstance(instruction, Copy) and not (
            differ(instruction.src, instruction.dst, devices) or (splits and place in loop)
        ):
            registers[instruction.result] = registers[instruction.value]
        for new in defined:
            if new not in registers:
                registers[new], count = count, count + 1
    return registers


def differ(ipu: int, other: int, devices: Sequence[torch.device]) -> bool:
    """Whether two IPUs have devices of their own."""
    return bool(devices) and devices[ipu] != devices[other]


def fetched_as(
    name: str, ipu: int, owners: Mapping[str, int], devices: Sequence[torch.device]
) -> str:
    """The name of a variable that `ipu` fetches: its own, if the owner has the same device."""
    return on_ipu(name, ipu) if differ(ipu, owners[name], devices) else name
