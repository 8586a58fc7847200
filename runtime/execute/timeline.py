"""Record the tasks of workers with their times, and write them as a trace, for Perfetto."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ipu_dynamo.profiling.recording import (
    RecordedSpan,
    Recording,
    ThreadRow,
    WorkerRow,
    this_thread,
)
from ipu_dynamo.program.schedule.actions import AddGradients, RunPass
from ipu_dynamo.program.schedule.stage_passes import StagePass
from ipu_dynamo.runtime.execute.observer import Observer
from ipu_dynamo.runtime.execute.timed import Interval, title_of


@dataclass(frozen=True, slots=True)
class Span:
    """One task: from `start` to `end`, in seconds of a common clock.

    Args:
        title: the kind of work, with stage and direction; the same for all micro-batches.
        function: the first one that it calls.
        source: first line of the user's model that it computes.
    """

    worker: int
    title: str
    stage: int
    ipu: int
    micro_batch: int
    replica: int
    start: float
    end: float
    function: str = ""
    source: str = ""

    @property
    def name(self) -> str:
        """The title with micro-batch and replica."""
        return f"{self.title}, micro-batch {self.micro_batch}, replica {self.replica}"


@dataclass
class Timeline(Observer):
    """The spans of one or more steps; workers append to it from their threads."""

    spans: list[Span] = field(default_factory=list)

    def task_ended(
        self, worker: int, of: StagePass, action: RunPass | AddGradients, time: Interval
    ) -> None:
        title = title_of(of)
        if isinstance(action, AddGradients):
            title = f"stage {of.stage} adds gradients"
        place = action.micro_batch, action.replica
        one = Span(worker, title, of.stage, of.ipu, *place, *time, of.function, of.source)
        self.spans.append(one)

    def busy(self) -> dict[int, float]:
        """Share of the time from the first to the last span in which each worker had a task."""
        if not self.spans:
            return {}
        begin, end = min(s.start for s in self.spans), max(s.end for s in self.spans)
        workers = sorted({span.worker for span in self.spans})
        return {
            w: sum(s.end - s.start for s in self.spans if s.worker == w) / (end - begin)
            for w in workers
        }

    def busy_at_once(self, count: int) -> float:
        """Share of the steady state in which at least `count` workers had a task.

        The steady state begins when the last worker starts its first task, and ends when the
        first worker has finished its last.
        """
        workers = sorted({span.worker for span in self.spans})
        begin = max(min(s.start for s in self.spans if s.worker == w) for w in workers)
        end = min(max(s.end for s in self.spans if s.worker == w) for w in workers)
        changes = sorted(
            edge
            for s in self.spans
            for edge in ((max(s.start, begin), 1), (min(s.end, end), -1))
            if s.end > begin and s.start < end
        )
        return _covered(changes, count) / (end - begin) if end > begin else 0.0

    def stash(self) -> dict[int, int]:
        """For each stage, the most micro-batches that were between its first and last task."""
        lives: dict[int, dict[tuple[int, int, int], tuple[float, float]]] = {}
        steps: Counter[tuple[int, int, str]] = Counter()
        for span in self.spans:
            task = (span.stage, span.replica, span.name)
            life = (span.replica, span.micro_batch, steps[task])
            steps[task] += 1
            begin, _ = lives.setdefault(span.stage, {}).get(life, (span.start, span.end))
            lives[span.stage][life] = (begin, span.end)
        return {
            stage: max(sum(b <= start < e for b, e in of.values()) for start, _ in of.values())
            for stage, of in sorted(lives.items())
        }

    def add_to(self, recording: Recording, caller: ThreadRow) -> None:
        """Add the spans to a recording: a process for each IPU, a thread for each worker.

        Args:
            caller: the thread that calls the program.
        """
        for one in self.spans:
            recording.add(_recorded(one, caller))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace: a process for each IPU, a thread for each worker."""
        recording, target = Recording(), Path(path)
        self.add_to(recording, this_thread())
        target.parent.mkdir(parents=True, exist_ok=True)
        recording.write(target)


def _covered(changes: Sequence[tuple[float, int]], count: int) -> float:
    """Seconds in which the running sum of `changes` is at least `count`."""
    level, before, total = 0, 0.0, 0.0
    for time, step in changes:
        if level >= count:
            total += time - before
        level, before = level + step, time
    return total


def _recorded(one: Span, caller: ThreadRow) -> RecordedSpan:
    arguments = {
        "stage": one.stage,
        "ipu": one.ipu,
        "micro_batch": one.micro_batch,
        "replica": one.replica,
        "function": one.function,
        "line": one.source,
    }
    row = WorkerRow(one.replica, one.ipu, one.worker, caller)
    return RecordedSpan(one.name, "stage pass", row, one.start, one.end, arguments)
