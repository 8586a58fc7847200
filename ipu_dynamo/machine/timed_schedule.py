"""Follow a schedule pass by pass, and find the period in which it repeats itself."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ipu_dynamo.machine.predicted_time import TimelineSection, TimelineSpan
from ipu_dynamo.machine.step_sections import LoopParts, Track, host_section, section
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.schedule.planning import schedule_of
from ipu_dynamo.program.schedule.schedule import Schedule

_STRIDES = (1, 2)  # micro-batches of a period; parallel phases take them in pairs


class _Run(NamedTuple):
    start: int
    position: int  # among the passes
    micro_batch: int


def timed_sections(program: Program, parts: LoopParts, count: int) -> tuple[TimelineSection, ...]:
    """The sections of a schedule's micro-batches.

    A copy delays the pass that reads it. A host transfer that stops all IPUs stops the schedule;
    these are in a section of their own.
    """
    schedule = schedule_of(program, micro_batches=count, replicas=1, workers=None)
    waits = [_host_waits(program, parts, index) for index in range(len(parts.passes))]
    lengths = [
        before + work.cycles + parts.late(index) + after
        for index, (work, (before, after)) in enumerate(zip(parts.passes, waits, strict=True))
    ]
    timed = schedule.timed(lengths, _delays(schedule, parts))
    runs = sorted(_Run(r.cycle, r.index, r.micro_batch) for of in timed.runs for r in of)
    total = timed.cycles

    def spans(chosen: Sequence[_Run], origin: int) -> list[TimelineSpan]:
        return [span for run in chosen for span in _spans(parts, run, origin, waits[run.position])]

    begin, period, times = _period(runs, len(parts.passes), count, total)
    end = begin + period * times
    early = [run for run in runs if run.start < begin]
    steady = [run for run in runs if begin <= run.start < begin + period]
    late = [run for run in runs if run.start >= end]
    sections = (
        *section("fill", spans(early, 0), begin),
        *section("period", spans(steady, begin), period, times),
        *section("flush", spans(late, end), total - end),
    )
    if not _stops_schedule(program, parts):
        return sections
    (*stops,) = host_section("host transfers", parts.host.loads + parts.host.stores, serial=True)
    return (*sections, *(TimelineSection(s.name, count, s.cycles, s.spans) for s in stops))


def _stops_schedule(program: Program, parts: LoopParts) -> bool:
    """Whether host transfers stop all IPUs of a replica, and not only one group of them."""
    return parts.host.stops_all and not _in_groups(program)


def _in_groups(program: Program) -> bool:
    """Whether the IPUs of even and odd numbers are groups for transfers from and to the host."""
    phased = any(call.phase is not None for call in program.calls)
    return phased and program.sync_pattern == "replica_and_ladder"


def _host_waits(program: Program, parts: LoopParts, index: int) -> tuple[int, int]:
    """How long an IPU waits for host transfers before and after a pass."""
    if _stops_schedule(program, parts):
        return 0, 0
    if not _in_groups(program):
        return parts.loads(index), parts.stores(index)
    ipu, passes = parts.passes[index].ipu, range(len(parts.passes))
    first = next(i for i in passes if parts.passes[i].ipu == ipu)
    last = max(i for i in passes if parts.passes[i].ipu == ipu)
    loads = sum(t for other, t in parts.host.loads.items() if (other - ipu) % 2 == 0)
    stores = sum(t for other, t in parts.host.stores.items() if (other - ipu) % 2 == 0)
    return loads * (index == first), stores * (index == last)


def _delays(schedule: Schedule, parts: LoopParts) -> list[int]:
    """The cycles of the copies of each transfer."""
    copied = {
        move.result: instruction
        for work in parts.passes
        for instruction in work.instructions
        for move in instruction.moves
        if move.how == "copied"
    }
    delays = []
    for transfer in schedule.transfers:
        copies = [copied[name] for name in transfer.values if name in copied]
        delays.append(max(parts.transfers.copies(copies).values(), default=0))
    return delays


def _spans(parts: LoopParts, run: _Run, origin: int, waits: tuple[int, int]) -> list[TimelineSpan]:
    """The spans of a pass; an IPU that waits for another's transfer does nothing."""
    work, track, (before, after) = parts.passes[run.position], Track(run.start - origin), waits
    if before:
        begin = track.end + before
        track.add(work.ipu, parts.loads(run.position), "host", "host", micro_batch=run.micro_batch)
        track.end = begin
    track.items(work.items, run.micro_batch)
    track.add(work.ipu, parts.late(run.position), "host", "host", micro_batch=run.micro_batch)
    if after:
        track.add(work.ipu, parts.stores(run.position), "host", "host", micro_batch=run.micro_batch)
    return track.spans


def _period(runs: Sequence[_Run], passes: int, count: int, total: int) -> tuple[int, int, int]:
    """Where the steady part of a schedule begins, how long its period is, and how often it is.

    In a steady part each pass starts as long after that of an earlier micro-batch as any other.
    """
    starts = [[0] * passes for _ in range(count)]
    for run in runs:
        starts[run.micro_batch][run.position] = run.start
    best = total, 0, 0
    for stride in _STRIDES:
        steps = [_step(starts[m], starts[m + stride]) for m in range(count - stride)]
        first = 0
        for step, of in groupby(steps):
            last = first + len([*of]) + stride - 1  # its start is a step after another one's
            if step:
                begin, end = max(starts[first]), min(starts[last])
                times = (end - begin) // step
                if times * step > best[1] * best[2] and times > 1:
                    best = begin, step, times
            first = last - stride + 1
        if best[2]:
            break
    return best


def _step(before: Sequence[int], after: Sequence[int]) -> int:
    """How much later all passes start; 0: not all alike."""
    steps = {b - a for a, b in zip(before, after, strict=True)}
    return steps.pop() if len(steps) == 1 else 0
