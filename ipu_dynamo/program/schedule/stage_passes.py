"""Group a micro-batch into stage passes: the work of one stage in one direction, unbroken.

A stage whose repeated blocks are functions of their own makes many calls in a pass. Schedules,
stashes and workers deal with passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Self

from ipu_dynamo.program.ir.collectives import Collective
from ipu_dynamo.program.ir.instructions import Call, Plain
from ipu_dynamo.program.ir.writes import Direction

# For each pass before which replicas exchange values, the earlier passes that make these, with
# their names.
Exchanges = Mapping[int, Mapping[int, tuple[str, ...]]]
NO_EXCHANGES: Exchanges = {}


@dataclass(frozen=True, slots=True)
class StagePass:
    """A stage pass, by the first function that it calls.

    Args:
        source: first line of the user's model that it computes.
        repeats: it computes at least half of its stage's forward pass again.
    """

    function: str
    ipu: int
    stage: int
    direction: Direction
    source: str
    repeats: bool = False

    @classmethod
    def of(cls, call: Call) -> Self:
        """The pass of a call, or of a pass as if it were one, without repetitions."""
        return cls(call.function, call.ipu, call.stage, call.direction, call.source)


def stage_passes(calls: Sequence[Call]) -> list[tuple[Call, ...]]:
    """Consecutive calls of one stage and direction, together."""
    return [tuple(together) for _, together in groupby(calls, attrgetter("stage_pass"))]


def calls_of_passes(loop: Sequence[Plain]) -> list[Call]:
    """Each stage pass of a micro-batch as if it were one call, with all that it reads and makes.

    In addition to its own calls, these are values that it receives, copies, stores, loads, sends.
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


def exchanges_of_passes(loop: Sequence[Plain]) -> Exchanges:
    """The values that replicas exchange between the passes of a micro-batch."""
    if not any(isinstance(instruction, Collective) for instruction in loop):
        return NO_EXCHANGES
    makers: dict[str, int] = {}
    found: dict[int, dict[int, tuple[str, ...]]] = {}
    for number, instructions in enumerate(instructions_of_passes(loop)):
        for instruction in instructions:
            if isinstance(instruction, Collective):
                of = found.setdefault(number, {})
                source = makers[instruction.value]
                of[source] = (*of.get(source, ()), instruction.value)
            makers |= dict.fromkeys(instruction.made_names, number)
    return found


def reads_and_makes(instruction: Plain) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The values and variables that an instruction reads or writes over, and values that it makes.

    Variables that are fetched for a call are left out: the call reads them.
    """
    if instruction.fetches:
        return (), ()
    return (*instruction.written_names, *instruction.read_names), instruction.made_names


def instructions_of_passes(loop: Sequence[Plain]) -> list[list[Plain]]:
    """All that each stage pass of a micro-batch does, in program order.

    The first pass receives. The next pass of an IPU does its loads, and its last pass does its
    stores and sends. The pass of the next call fetches variables, and the pass of the call before
    does copies and writes.
    """
    calls = [instruction for instruction in loop if isinstance(instruction, Call)]
    pass_of = [number for number, of in enumerate(stage_passes(calls)) for _ in of]
    if not calls:
        return [list(loop)]
    by_pass: list[list[Plain]] = [[] for _ in range(pass_of[-1] + 1)]
    passed = 0
    for instruction in loop:
        if "loop" not in instruction.sections:
            raise ValueError(f"this is not done for every micro-batch: {instruction}")
        if isinstance(instruction, Call):
            call, passed = passed, passed + 1
        else:
            call = _call_of(instruction, calls, passed)
        by_pass[pass_of[max(call, 0)]].append(instruction)
    return by_pass


def _call_of(instruction: Plain, calls: Sequence[Call], passed: int) -> int:
    """Find the call to whose stage pass an instruction belongs; `passed` calls are before it."""
    if instruction.fetches:
        return passed
    match instruction.done_by:
        case "first":
            return 0
        case "previous":
            return passed - 1
        case "next there":
            return _next(calls, passed, *instruction.ipus)
        case "last there":
            return _last(calls, passed, *instruction.ipus)


def _next(calls: Sequence[Call], passed: int, ipu: int) -> int:
    return min(i for i, call in enumerate(calls) if call.ipu == ipu and i >= passed)


def _last(calls: Sequence[Call], passed: int, ipu: int) -> int:
    before = [i for i, call in enumerate(calls) if call.ipu == ipu and i < passed]
    return max(before, default=0)
