"""Group a micro-batch into stage passes: what one stage does in one direction, without a break.

A stage whose repeated blocks are functions of their own makes many calls in a pass. Schedules,
stashes and workers deal with passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Self, assert_never

from ipu_dynamo.program.ir.clipping import ClipFactor, ClipValues, GradientNorm
from ipu_dynamo.program.ir.coupled_update import JointUpdate, UpdatePart
from ipu_dynamo.program.ir.instructions import (
    AdjustLossScale,
    AllGather,
    AllReduce,
    Call,
    Copy,
    Load,
    Plain,
    Receive,
    ReduceScatter,
    Send,
    Store,
    Update,
)
from ipu_dynamo.program.ir.update_factors import UpdateFactors
from ipu_dynamo.program.ir.writes import Accumulate, Direction, WriteBuffer


@dataclass(frozen=True, slots=True)
class StagePass:
    """A stage pass, by the first function that it calls.

    Args:
        source: first line of the user's model that it computes.
    """

    function: str
    ipu: int
    stage: int
    direction: Direction
    source: str

    @classmethod
    def of(cls, call: Call) -> Self:
        """The pass of a call, or of a pass as if it were one."""
        return cls(call.function, call.ipu, call.stage, call.direction, call.source)


def stage_passes(calls: Sequence[Call]) -> list[tuple[Call, ...]]:
    """Consecutive calls of one stage and direction, together."""
    return [tuple(together) for _, together in groupby(calls, attrgetter("stage_pass"))]


def calls_of_passes(loop: Sequence[Plain]) -> list[Call]:
    """Each stage pass of a micro-batch as if it were one call, with all that it reads and makes.

    Beside its own calls that is what it receives, copies, stores, loads and sends.
    """
    calls = []
    for instructions in instructions_of_passes(loop):
        own = [i for i in instructions if isinstance(i, Call)]
        if not own:  # nothing is computed, as in a model that returns None
            continue
        names = [reads_and_makes(instruction) for instruction in instructions]
        makes = dict.fromkeys(name for _, made in names for name in made)
        reads = dict.fromkeys(name for read, _ in names for name in read if name not in makes)
        calls.append(replace(own[0], arguments=tuple(reads), results=tuple(makes)))
    return calls


def reads_and_makes(instruction: Plain) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The values and variables that an instruction reads or writes over, and values that it makes.

    Variables that come from off the chip are left out, and the values that are added to sums.
    """
    match instruction:
        case Call(arguments=arguments, results=results):
            return arguments, tuple(name for name in results if name)
        case Accumulate(accumulators=names, weight=weight):
            return (*names, weight) if weight else names, ()
        case WriteBuffer(variables=names):
            return names, ()
        case Load() if is_fetch(instruction):
            return (), ()
        case Load() | Store() | Copy():
            return (instruction.value,), (instruction.result,)
        case Receive(result=result):
            return (), (result,)
        case Send(value=value):
            return (value,), ()
    return (), ()


def instructions_of_passes(loop: Sequence[Plain]) -> list[list[Plain]]:
    """All that each stage pass of a micro-batch does, in program order.

    The first pass receives. What an IPU loads is loaded by its next pass, and what it stores or
    sends by its last one; a variable is fetched by the pass of the next call, and a copy or a write
    made by that of the call before.
    """
    calls = [instruction for instruction in loop if isinstance(instruction, Call)]
    pass_of = [number for number, of in enumerate(stage_passes(calls)) for _ in of]
    if not calls:
        return [list(loop)]
    by_pass: list[list[Plain]] = [[] for _ in range(pass_of[-1] + 1)]
    passed = 0
    for instruction in loop:
        match instruction:
            case Receive():
                call = 0
            case Call():
                call, passed = passed, passed + 1
            case Copy() | Accumulate() | WriteBuffer():
                call = passed - 1
            case Load() if not is_fetch(instruction):
                call = _next(calls, passed, instruction.ipu)
            case Load() | AllGather():
                call = passed
            case Store() | Send():
                call = _last(calls, passed, instruction.ipu)
            case ReduceScatter() | AllReduce() | Update() | AdjustLossScale():
                raise ValueError(f"this is not done for every micro-batch: {instruction}")
            case GradientNorm() | ClipFactor() | ClipValues() | UpdateFactors():
                raise ValueError(f"this is not done for every micro-batch: {instruction}")
            case UpdatePart() | JointUpdate():
                raise ValueError(f"this is not done for every micro-batch: {instruction}")
            case _:
                assert_never(instruction)
        by_pass[pass_of[max(call, 0)]].append(instruction)
    return by_pass


def is_fetch(load: Load | AllGather) -> bool:
    """Whether it brings a variable to an IPU, and not a value that was stored."""
    return isinstance(load, AllGather) or load.value == load.result


def _next(calls: Sequence[Call], passed: int, ipu: int) -> int:
    return min(i for i, call in enumerate(calls) if call.ipu == ipu and i >= passed)


def _last(calls: Sequence[Call], passed: int, ipu: int) -> int:
    before = [i for i, call in enumerate(calls) if call.ipu == ipu and i < passed]
    return max(before, default=0)
