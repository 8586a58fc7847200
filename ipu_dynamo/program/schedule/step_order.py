"""Order the instructions of a step on each IPU.

The micro-batches of a step repeat one period, which is listed once:

    pipelined               a cycle: every stage pass, each on a micro-batch of its own; then copies
    phases on several IPUs  two micro-batches, the second one phase behind
    otherwise               a micro-batch

A pass begins with the variables that it loads and gathers. At its end its results are copied,
stored, or written to buffers. In a pipeline all copies take place at the end of the cycle. A load
or store with a phase takes place in that phase.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from ipu_dynamo.program.ir.instructions import (
    AllGather,
    Call,
    Copy,
    Load,
    Plain,
    Repeat,
    Store,
)
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.writes import WriteBuffer
from ipu_dynamo.program.schedule.dependencies import changes_between_calls
from ipu_dynamo.program.schedule.pipeline_clock import slots, slots_left, waits_of
from ipu_dynamo.program.schedule.pipeline_orders import listed_cycles
from ipu_dynamo.program.schedule.sections import Sections, sections
from ipu_dynamo.program.schedule.stage_passes import calls_of_passes, instructions_of_passes

_AT_START, _IN_PASS, _AT_END = range(3)


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """An instruction of a micro-batch with its place in the period.

    Args:
        number: of the instruction.
        micro_batch: number of the micro-batch in the period.
        stage_pass: number of the pass that does it.
        slot: of the pass in the pipeline; 0 without one.
        weights: the pass computes weight gradients alone.
        turn: instructions of an IPU follow each other in the order of it.
    """

    number: int
    instruction: Plain
    micro_batch: int
    stage_pass: int
    slot: int
    weights: bool
    turn: tuple[int, ...]


def _kept_by_slots(first: int, last: int) -> int:
    return 1 + last - first


def _turns(calls: Sequence[Call]) -> list[int]:
    """Number the passes of a pipeline whose IPUs follow lists; weight gradients are last."""
    ordered = sorted(calls, key=lambda call: call.direction == "weights")
    numbers = {
        key: n for n, key in enumerate(dict.fromkeys((c.stage, c.direction) for c in ordered))
    }
    return [numbers[call.stage, call.direction] for call in calls]


def _kept_by_lists(
    of_passes: Sequence[int],
    cycles: Mapping[tuple[int, int], int],
    micro_batches: int,
    first: int,
    last: int,
) -> int:
    """The same if IPUs follow lists: the most micro-batches that are between two slots at once.

    Args:
        of_passes: the slot of each pass.
        cycles: in which a pass and a micro-batch begin, if each pass takes one.
    """
    at = [[i for i, slot in enumerate(of_passes) if slot == wanted] for wanted in (first, last)]
    if first == last or not all(at):
        return 1
    begins, ends = (
        [pick(cycles[i, m] for i in passes) for m in range(micro_batches)]
        for pick, passes in zip((min, max), at, strict=True)
    )
    return max(sum(a <= cycle <= b for a, b in zip(begins, ends, strict=True)) for cycle in begins)


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The instructions of a step, in order.

    Args:
        before, after: instructions with their numbers.
        period: instructions of the micro-batches of a period, each micro-batch in program order.
        pipelined: whether each pass of the period works on a micro-batch of its own.
        left: for how many slots each IPU has nothing but weight gradients to do at the end.
        kept: of how many micro-batches a value is kept at once, from a slot to a later one.
    """

    before: tuple[tuple[int, Plain], ...]
    period: tuple[PlacedStep, ...]
    after: tuple[tuple[int, Plain], ...]
    pipelined: bool
    left: dict[int, int]
    kept: Callable[[int, int], int] = _kept_by_slots

    @classmethod
    def of(cls, program: Program) -> "StepOrder":
        """The order of a program."""
        cut = sections(program)
        plain = [(n, i) for n, i in enumerate(program.walk()) if not isinstance(i, Repeat)]
        start, stop = len(cut.before), len(cut.before) + len(cut.loop)
        loop = plain[start:stop]
        passes = _numbered_passes(loop)
        calls = calls_of_passes(cut.loop)
        pipelined = program.order == "pipelined" and len({call.ipu for call in calls}) > 1
        of_passes = slots(calls) if pipelined else [0] * len(passes)
        if program.schedule:
            of_passes = _turns(calls)
        period = _period(program, cut, passes, of_passes, pipelined=pipelined)
        left = slots_left(calls) if pipelined and not program.schedule else {}
        kept = _kept_by_slots
        if program.schedule:
            cycles = listed_cycles(calls, waits_of(calls), program.schedule, cut.micro_batches)
            kept = partial(_kept_by_lists, of_passes, cycles, cut.micro_batches)
        before, after = tuple(plain[:start]), tuple(plain[stop:])
        return cls(before, tuple(period), after, pipelined, left, kept)


def _numbered_passes(loop: Sequence[tuple[int, Plain]]) -> list[list[tuple[int, Plain]]]:
    """The instructions of each stage pass with their numbers."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, instruction in reversed(loop):
        numbers[id(instruction)].append(number)
    passes = instructions_of_passes([instruction for _, instruction in loop])
    return [[(numbers[id(i)].pop(), i) for i in instructions] for instructions in passes]


def _period(
    program: Program,
    cut: Sections,
    passes: Sequence[Sequence[tuple[int, Plain]]],
    of_passes: Sequence[int],
    *,
    pipelined: bool,
) -> Iterator[PlacedStep]:
    phases = [_phase(instructions) for instructions in passes]
    phased = any(phase is not None for phase in phases)
    ipus = {i.ipu for _, i in (one for of in passes for one in of) if isinstance(i, Call)}
    several = phased and len(ipus) > 1 and not changes_between_calls(program)
    count = 2 if several and cut.micro_batches > 1 else 1
    for micro_batch, index in product(range(count), range(len(passes))):
        made: set[str] = set()
        weights = any(isinstance(i, Call) and i.direction == "weights" for _, i in passes[index])
        cycle = (phases[index] or 0) + micro_batch if phased else 0 if pipelined else index
        for number, instruction in passes[index]:
            made.update(instruction.made_names)
            late = isinstance(instruction, Store | WriteBuffer) or (
                isinstance(instruction, Copy) and instruction.value in made
            )
            when = -1 if instruction.fetches else int(late)
            turn: tuple[int, ...] = (cycle, _IN_PASS, weights, index, micro_batch, when, number)
            phase = getattr(instruction, "phase", None)
            if pipelined and isinstance(instruction, Copy):
                turn = (cycle, _AT_END, number)
            elif phase is not None and isinstance(instruction, Load | AllGather):
                turn = (phase + micro_batch, _AT_START, micro_batch, number)
            elif phase is not None and isinstance(instruction, Store):
                turn = (phase + micro_batch, _AT_END, micro_batch, number)
            yield PlacedStep(
                number, instruction, micro_batch, index, of_passes[index], weights, turn
            )


def _phase(instructions: Sequence[tuple[int, Plain]]) -> int | None:
    return next((i.phase for _, i in instructions if isinstance(i, Call)), None)
