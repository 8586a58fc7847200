"""Record the actions of workers with their times, and write a Chrome trace, for Perfetto."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ipu_dynamo.program.schedule.actions import AddGradients, RunPass
from ipu_dynamo.program.schedule.stage_passes import StagePass
from ipu_dynamo.runtime.execute.observer import Interval, Observer


@dataclass(frozen=True, slots=True)
class Span:
    """One action: from `start` to `end`, in seconds of a common clock."""

    worker: int
    name: str
    stage: int
    ipu: int
    micro_batch: int
    replica: int
    start: float
    end: float


@dataclass
class Timeline(Observer):
    """The spans of one or more steps; workers append to it from their threads."""

    spans: list[Span] = field(default_factory=list)

    def task_ended(
        self, worker: int, of: StagePass, action: RunPass | AddGradients, time: Interval
    ) -> None:
        what = "add gradients" if isinstance(action, AddGradients) else of.function
        name, place = f"{what} {action.micro_batch}", (action.micro_batch, action.replica)
        self.spans.append(Span(worker, name, of.stage, of.ipu, *place, *time))

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

    def write(self, path: str | Path) -> None:
        """Write a Chrome trace: a row per worker."""
        begin = min((span.start for span in self.spans), default=0.0)
        events = [_event(span, begin) for span in sorted(self.spans, key=lambda s: s.start)]
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        part.write_text(text)
        part.replace(target)


def _covered(changes: Sequence[tuple[float, int]], count: int) -> float:
    """Seconds in which the running sum of `changes` is at least `count`."""
    level, before, total = 0, 0.0, 0.0
    for time, step in changes:
        if level >= count:
            total += time - before
        level, before = level + step, time
    return total


def _event(span: Span, begin: float) -> dict[str, Any]:
    return {
        "name": span.name,
        "cat": f"stage {span.stage}",
        "ph": "X",
        "ts": (span.start - begin) * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "pid": span.replica,
        "tid": span.worker,
        "args": {"stage": span.stage, "ipu": span.ipu, "micro_batch": span.micro_batch},
    }
