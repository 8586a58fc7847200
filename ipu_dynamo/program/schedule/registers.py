"""Give every value of a program a register, so that none is found by name while it runs."""

from collections.abc import Mapping, Sequence
from typing import assert_never

import torch

from ipu_dynamo.program.ir.clipping import ClipFactor, ClipValues, GradientNorm
from ipu_dynamo.program.ir.coupled_update import JointUpdate, UpdatePart
from ipu_dynamo.program.ir.instructions import (
    AdjustLossScale,
    AllGather,
    AllReduce,
    Call,
    Copy,
    Load,
    Receive,
    ReduceScatter,
    Send,
    Store,
    Update,
)
from ipu_dynamo.program.ir.made_names import on_ipu
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.update_factors import UpdateFactors
from ipu_dynamo.program.ir.writes import Accumulate, WriteBuffer
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import is_fetch


def number_registers(
    program: Program, arguments: Sequence[str] = (), devices: Sequence[torch.device] = ()
) -> dict[str, int]:
    """A register for every name; on one device a copy is the same tensor, and in the same register.

    No IPU waits for another's weight gradients, so where these are calls of their own it is not
    known who reads a value last: then a copy has a register of its own, and each IPU drops its own.

    Args:
        arguments: get the first registers, in order; streams among them are received there.
        devices: of the IPUs; none: they share one.
    """
    names = arguments or [variable.name for variable in program.variables]
    registers = {name: register for register, name in enumerate(names)}
    count = len(names)
    owners = {variable.name: variable.ipu for variable in program.variables}
    cut = sections(program)
    loop, apart = set(cut.loop), any(call.direction == "weights" for call in program.calls)
    for instruction in cut.all:
        defined: tuple[str | None, ...] = ()
        match instruction:
            case Receive(stream=stream, result=name) if stream in arguments:
                registers[name] = registers[stream]
            case Load() | AllGather() if is_fetch(instruction):
                defined = (fetched_as(instruction.value, instruction.ipu, owners, devices),)
            case Receive(result=name) | Store(result=name) | Load(result=name):
                defined = (name,)
            case Call(results=results):
                defined = results
            case Copy(result=name, src=src, dst=dst) if differ(src, dst, devices):
                defined = (name,)
            case Copy(result=name) if apart and instruction in loop:
                defined = (name,)
            case Copy(value=value, result=name):
                registers[name] = registers[value]
            case Send() | AllGather() | ReduceScatter() | AllReduce() | Update():
                continue
            case AdjustLossScale() | Accumulate() | WriteBuffer() | ClipValues():
                continue
            case GradientNorm(result=name) | ClipFactor(result=name):
                defined = (name,)
            case UpdateFactors(results=results) | UpdatePart(results=results):
                defined = results
            case JointUpdate(results=results):
                defined = results
            case _:
                assert_never(instruction)
        for new in defined:
            if new and new not in registers:
                registers[new], count = count, count + 1
    return registers


def differ(ipu: int, other: int, devices: Sequence[torch.device]) -> bool:
    """Whether two IPUs have devices of their own."""
    return bool(devices) and devices[ipu] != devices[other]


def fetched_as(
    name: str, ipu: int, owners: Mapping[str, int], devices: Sequence[torch.device]
) -> str:
    """What `ipu` calls a variable that it fetches: on the device of its home, that is the same."""
    return on_ipu(name, ipu) if differ(ipu, owners[name], devices) else name
