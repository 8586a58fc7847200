"""Lay the work of IPUs in a step on a timeline, in sections of which one may repeat."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ipu_dynamo.machine.host_transfers import HostTransfers, Times
from ipu_dynamo.machine.predicted_time import SectionName, TimelineSection, TimelineSpan, Work
from ipu_dynamo.machine.step_costs import PassWork, WorkItem
from ipu_dynamo.machine.transfer_times import MoveTimes

Pairs = Mapping[tuple[int, int], int]


class Running(NamedTuple):
    """A stage pass of a micro-batch."""

    position: int  # among the passes
    micro_batch: int


@dataclass(frozen=True)
class LoopParts:
    """The parts of a micro-batch: passes, copies and host transfers.

    Args:
        passes: in program order.
        host: the transfers; those of an IPU come before its first and after its last pass.
    """

    passes: Sequence[PassWork]
    transfers: MoveTimes
    host: HostTransfers

    def loads(self, index: int) -> int:
        """Cycles of loads before a pass."""
        work = self.passes[index]
        first = next(i for i, one in enumerate(self.passes) if one.ipu == work.ipu)
        return self.host.loads[work.ipu] if index == first else 0

    def stores(self, index: int) -> int:
        """Cycles of stores after a pass."""
        ipu = self.passes[index].ipu
        last = max(i for i, one in enumerate(self.passes) if one.ipu == ipu)
        return self.host.stores[ipu] if index == last else 0

    def late(self, index: int) -> int:
        """Cycles that an IPU waits after its last pass for transfers that go on meanwhile."""
        ipu = self.passes[index].ipu
        last = max(i for i, one in enumerate(self.passes) if one.ipu == ipu)
        return max(0, self.host.hidden[ipu] - self.computing[ipu]) if index == last else 0

    @property
    def computing(self) -> Counter[int]:
        """Cycles of an IPU's passes."""
        cycles: Counter[int] = Counter()
        for work in self.passes:
            cycles[work.ipu] += work.cycles
        return cycles

    def copies(self, running: Iterable[Running]) -> Pairs:
        """The cycles of the copies that passes leave, by the IPUs from and to."""
        instructions = (i for run in running for i in self.passes[run.position].instructions)
        return self.transfers.copies(instructions)


class Track:
    """The spans of an IPU or of several, one after the other."""

    def __init__(self, start: int = 0) -> None:
        self.end = start
        self.spans: list[TimelineSpan] = []

    def add(
        self, ipu: int, cycles: int, work: Work, name: str, call: int = -1, micro_batch: int = -1
    ) -> None:
        """Append a span; nothing if it takes no time."""
        if cycles:
            span = TimelineSpan(ipu, self.end, cycles, work, name, call, micro_batch)
            self.spans.append(span)
            self.end += cycles

    def items(self, items: Iterable[WorkItem], micro_batch: int = -1) -> None:
        """Append a span for each item."""
        for item in items:
            self.add(item.ipu, item.cycles, item.work, item.name, item.call, micro_batch)


def section(
    name: SectionName, spans: Sequence[TimelineSpan], cycles: int, count: int = 1
) -> tuple[TimelineSection, ...]:
    """A section; none if nothing takes any time."""
    return (TimelineSection(name, count, cycles, tuple(spans)),) if cycles and count else ()


def side_by_side(name: SectionName, items: Iterable[WorkItem]) -> tuple[TimelineSection, ...]:
    """A section in which each IPU runs its own items, as long as the slowest one."""
    tracks: defaultdict[int, Track] = defaultdict(Track)
    for item in items:
        tracks[item.ipu].items([item])
    spans = [span for ipu in sorted(tracks) for span in tracks[ipu].spans]
    return section(name, spans, max((track.end for track in tracks.values()), default=0))


def host_section(name: SectionName, times: Times, *, serial: bool) -> tuple[TimelineSection, ...]:
    """A section of host transfers alone.

    Args:
        serial: one stops the others.
    """
    items = [WorkItem(ipu, "host", "host", cycles) for ipu, cycles in sorted(times.items())]
    if not serial:
        return side_by_side(name, items)
    track = Track()
    track.items(items)
    return section(name, track.spans, track.end)


def one_by_one(parts: LoopParts, count: int) -> tuple[TimelineSection, ...]:
    """The sections of micro-batches that come one after the other, and so do their passes."""
    track = Track()
    for ipu, cycles in sorted(parts.host.loads.items()):
        track.add(ipu, cycles, "host", "host", micro_batch=0)
    begin = track.end
    for index, work in enumerate(parts.passes):
        track.items(work.items, 0)
        for (src, dst), cycles in parts.copies([Running(index, 0)]).items():
            start = track.end
            track.add(src, cycles, "copy", f"ipu{src} -> ipu{dst}", micro_batch=0)
            arriving = Track(start)
            arriving.add(dst, cycles, "copy", f"ipu{src} -> ipu{dst}", micro_batch=0)
            track.spans += arriving.spans
    ipu, hidden = max(parts.host.hidden.items(), key=lambda pair: pair[1], default=(0, 0))
    track.add(ipu, max(0, hidden - (track.end - begin)), "host", "host", micro_batch=0)
    for ipu, cycles in sorted(parts.host.stores.items()):
        track.add(ipu, cycles, "host", "host", micro_batch=0)
    return section("period", track.spans, track.end, count)


def pipelined_sections(
    parts: LoopParts, slots: Sequence[int], count: int
) -> tuple[TimelineSection, ...]:
    """The sections of a grouped pipeline: fill, a cycle that repeats, and flush.

    Args:
        slots: of each pass, the pipeline stage.
        count: of micro-batches.
    """
    length, stages = _cycle(parts), max(slots) + 1
    ends = range(stages - 1) if count >= stages else range(count + stages - 1)

    def spans(cycles: Iterable[int]) -> list[TimelineSpan]:
        made: list[TimelineSpan] = []
        for place, cycle in enumerate(cycles):
            running = [
                Running(index, cycle - slot)
                for index, slot in enumerate(slots)
                if 0 <= cycle - slot < count
            ]
            made += _cycle_spans(parts, running, place * length, length)
        return made

    fill = section("fill", spans(ends), len(ends) * length)
    if count < stages:
        return fill
    flush = range(count, count + stages - 1)
    return (
        *fill,
        *section("period", spans([stages - 1]), length, count - stages + 1),
        *section("flush", spans(flush), len(flush) * length),
    )


def _cycle(parts: LoopParts) -> int:
    """The length of a pipeline cycle."""
    host, computing = parts.host, parts.computing
    own = {ipu: max(cycles, host.hidden[ipu]) for ipu, cycles in computing.items()}
    every = [Running(index, 0) for index in range(len(parts.passes))]
    copies = max(parts.copies(every).values(), default=0)
    loads, stores = host.loads, host.stores
    if host.stops_all:
        return max(own.values(), default=0) + loads.total() + stores.total() + copies
    return max((own[ipu] + loads[ipu] + stores[ipu] for ipu in own), default=0) + copies


def _cycle_spans(
    parts: LoopParts, running: Sequence[Running], start: int, length: int
) -> list[TimelineSpan]:
    """The spans of one pipeline cycle."""
    serial = parts.host.stops_all
    before = parts.host.loads.total() if serial else 0
    tracks: dict[int, Track] = {}
    host = Track(start)
    for run in running:
        ipu = parts.passes[run.position].ipu
        track = host if serial else tracks.setdefault(ipu, Track(start))
        track.add(ipu, parts.loads(run.position), "host", "host", micro_batch=run.micro_batch)
    for run in running:
        work = parts.passes[run.position]
        track = tracks.setdefault(work.ipu, Track(start + before))
        track.items(work.items, run.micro_batch)
        track.add(work.ipu, parts.late(run.position), "host", "host", micro_batch=run.micro_batch)
    copies = parts.copies(running)
    after = max(parts.copies(Running(i, 0) for i in range(len(parts.passes))).values(), default=0)
    end = start + length - after
    if serial:
        host.end = end - parts.host.stores.total()
    for run in running:
        ipu = parts.passes[run.position].ipu
        track = host if serial else tracks[ipu]
        track.add(ipu, parts.stores(run.position), "host", "host", micro_batch=run.micro_batch)
    of_ipus: Counter[int] = Counter()
    for pair, cycles in copies.items():
        for ipu in pair:
            of_ipus[ipu] = max(of_ipus[ipu], cycles)
    moved = Track(end)
    for ipu, cycles in sorted(of_ipus.items()):
        moved.end = end
        moved.add(ipu, cycles, "copy", "copies")
    return [span for track in (host, *tracks.values(), moved) for span in track.spans]
