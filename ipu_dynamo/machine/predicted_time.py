"""Define the part of a prediction about time: an IPU's cycles, and the timeline.

All cycles are whole tile cycles, so that sums are exact.
"""

from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.machine.predicted_operators import Cycles

Work = Literal["call", "write", "copy", "host", "off chip", "replicas", "update"]
SectionName = Literal[
    "before",
    "first load",
    "fill",
    "period",
    "flush",
    "host transfers",
    "last store",
    "results",
    "after",
    "host",
    "call",
]


@dataclass(frozen=True, slots=True)
class IpuCycles:
    """Cycles of an IPU in a step; their sum is the step.

    Args:
        operators: of calls, and of writes to accumulators and buffers.
        copies: between IPUs.
        host_io: transfers from and to the host, as far as nothing hides them.
        off_chip: loads and stores, likewise.
        replicas: collectives, within micro-batches and around them.
        update: clipping and updates.
        host: the host's work for each update.
        idle: the IPU waits for others.
    """

    operators: Cycles
    copies: int
    host_io: int
    off_chip: int
    replicas: int
    update: int
    host: int
    idle: int

    @property
    def busy(self) -> int:
        """Cycles in which the IPU does anything."""
        moved = self.copies + self.host_io + self.off_chip + self.replicas
        return self.operators.total + moved + self.update

    @property
    def total(self) -> int:
        """The step."""
        return self.busy + self.host + self.idle


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Something that takes time.

    Args:
        track: an IPU; -1: links and host.
        start: cycles since the begin of its section.
        name: for readers.
        call: position in `calls`; -1: it is no call.
        micro_batch: in its step; in a section that repeats, at its first time. -1: of all.
    """

    track: int
    start: int
    cycles: int
    work: Work
    name: str
    call: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class TimelineSection:
    """A part of the step's timeline.

    Args:
        count: how often it repeats, one after the other.
        cycles: of one time.
    """

    name: SectionName
    count: int
    cycles: int
    spans: tuple[TimelineSpan, ...]
