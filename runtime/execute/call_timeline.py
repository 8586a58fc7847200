"""Record all that one call does: steps, tasks, instructions with their bytes, and memory.

The call is a span of its thread, and so are its steps. Tasks and instructions are spans of a worker
on their IPU. Instructions around the micro-batches of a step act on all replicas. They are on the
first one.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from ipu_dynamo.ops.private.locks import fork_safe_lock
from ipu_dynamo.profiling.private.profiler import ProfilerRow
from ipu_dynamo.profiling.recording import (
    RecordedBytes,
    RecordedLater,
    RecordedSpan,
    Recording,
    ThreadRow,
    WorkerRow,
    this_thread,
)
from ipu_dynamo.program import Call, Copy, Plain, Program
from ipu_dynamo.program.schedule.actions import RunPass
from ipu_dynamo.program.schedule.stage_passes import StagePass
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.timed import Interval, Timed, label_of, title_of
from ipu_dynamo.runtime.execute.timeline import Span, Timeline

_CATEGORIES = {  # of instructions, by what they move
    "received": "host transfer",
    "sent": "host transfer",
    "copied": "copy",
    "stored": "off chip",
    "loaded": "off chip",
}


class TaskBytes(NamedTuple):
    """The memory of this computer around a task, by stage and category.

    Args:
        task: its stage, the first function that it calls, its micro-batch and its replica.
        most: at its peak.
    """

    task: tuple[int, str, int, int]
    most: Mapping[int, Mapping[Any, int]]  # whose keys are texts
    after: Mapping[int, Mapping[Any, int]]


class CallTimeline(Timeline):
    """The spans of one call, the last one; at its end they go to recordings.

    Args:
        program: what runs.
        title: of the call; empty: made of its kind.
        replicas: those that run here.
        to: recordings that get the spans.
        followed: finds the memory around the tasks of the first step; it is asked when a recording
            is written.
    """

    def __init__(
        self,
        program: Program,
        title: str = "",
        replicas: range = range(1),
        to: Sequence[Recording] = (),
        followed: Callable[[], Sequence[TaskBytes]] | None = None,
    ) -> None:
        super().__init__()
        self._to, self._followed = to, followed
        self.title = title or f"{program.kind} call"
        self._types = {stream.name: stream.type for stream in program.inputs}
        self._types |= {stream.name: stream.type for stream in program.outputs}
        self._types |= {variable.name: variable.held for variable in program.variables}
        self._first_replica = replicas.start
        self._others: list[RecordedSpan | RecordedBytes] = []
        self._caller, self._start = ThreadRow(0, ""), 0.0
        self._held: dict[tuple[int, int], Mapping[int, int]] = {}  # by replica and micro-batch
        self._sums = Counter[tuple[int, int]]()  # of these, by replica and IPU
        self._adding = fork_safe_lock()  # workers report at the same time
        self._variables: dict[tuple[int, int], Counter[str]] = {}  # by replica and IPU
        for variable in program.variables:
            for replica in replicas[:1] if variable.replicated else replicas:
                of = self._variables.setdefault((replica, variable.ipu), Counter())
                of[variable.kind] += variable.held.nbytes

    def call_began(self, micro_batches: int) -> None:
        self.spans.clear()
        self._others.clear()
        self._held.clear()
        self._sums.clear()
        self._caller, self._start = this_thread(), perf_counter()
        for replica, ipu in self._variables:
            self._count(replica, ipu)

    def call_ended(self, streams: HostStreams | None, complete: bool) -> None:
        arguments = {"complete": complete}
        self._add(self.title, "call", self._caller, (self._start, perf_counter()), arguments)
        for each in self._to:
            self.add_to(each, self._caller)

    def add_to(self, recording: Recording, caller: ThreadRow) -> None:
        super().add_to(recording, caller)
        for one in [*self._others]:
            recording.add(one)
        if self._followed is not None:
            recording.add(RecordedLater(partial(_rows, [*self.spans], self._followed)))

    def step_timed(self, step: int, time: Interval) -> None:
        self._add(f"step {step}", "step", self._caller, time, {})

    def instruction_ended(
        self,
        worker: int,
        of: StagePass | None,
        run: RunPass | None,
        instruction: Plain,
        time: Interval,
    ) -> None:
        arguments: dict[str, Any] = {"instruction": instruction}  # text takes time
        if nbytes := self._nbytes(instruction):
            arguments["bytes"] = nbytes
        if run is not None:
            arguments |= {"micro_batch": run.micro_batch, "replica": run.replica}
        if source := getattr(instruction, "source", ""):
            arguments["line"] = source
        if isinstance(instruction, Copy):
            arguments |= {"from": instruction.src, "to": instruction.dst}
        replica = self._first_replica if run is None else run.replica
        ipu = of.ipu if of is not None else _ipu_of(instruction)
        row = WorkerRow(replica, ipu, worker, self._caller)
        self._add(label_of(instruction), _category(instruction, run), row, time, arguments)

    def values_held(self, replica: int, micro_batch: int, nbytes: Mapping[int, int]) -> None:
        with self._adding:
            before = self._held.get((replica, micro_batch), {})
            self._held[replica, micro_batch] = dict(nbytes)
            for ipu in sorted({*before, *nbytes}):
                self._sums[replica, ipu] += nbytes.get(ipu, 0) - before.get(ipu, 0)
                self._count(replica, ipu)

    def _count(self, replica: int, ipu: int) -> None:
        """Note the bytes on an IPU from now on."""
        values = self._sums[replica, ipu]
        nbytes = {**self._variables.get((replica, ipu), {}), "values": values}
        self._others.append(RecordedBytes(replica, ipu, perf_counter(), nbytes))

    def _add(
        self,
        name: str,
        category: str,
        row: ThreadRow | WorkerRow,
        time: Interval,
        arguments: Mapping[str, Any],
    ) -> None:
        self._others.append(RecordedSpan(name, category, row, *time, arguments))

    def _nbytes(self, instruction: Plain) -> int:
        """The bytes that an instruction moves on a replica."""
        total = 0
        for move in instruction.moves:
            known = self._types.get(move.result) or self._types.get(move.value)
            nbytes = move.nbytes
            total += nbytes if nbytes is not None else known.nbytes if known is not None else 0
        return total

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """The block of a call without observed streams."""
        self.call_began(1)
        complete = False
        try:
            with ProfilerRow(self.title):
                yield
            complete = True
        finally:
            self.call_ended(None, complete)

    def run(
        self,
        worker: int,
        of: StagePass,
        run: RunPass,
        task: Callable[[Callable[[Plain], AbstractContextManager[None]]], None],
    ) -> None:
        """Run a task, and report its times to all observers.

        Args:
            task: takes a function that makes a block of each of its instructions.
        """
        start = perf_counter()
        with ProfilerRow(title_of(of)):
            task(partial(Timed, self.instruction_ended, worker, of, run))
        self.task_ended(worker, of, run, (start, perf_counter()))


def _rows(
    spans: Sequence[Span], followed: Callable[[], Sequence[TaskBytes]]
) -> Iterator[RecordedBytes]:
    """A row of counters for each stage: the peak of each task from its beginning, and what is
    left at its end."""
    first: dict[tuple[int, str, int, int], Span] = {}
    for span in spans:
        first.setdefault((span.stage, span.function, span.micro_batch, span.replica), span)
    ipus = {span.stage: (span.replica, span.ipu) for span in reversed(spans)}
    tasks, names = followed(), dict[int, dict[str, int]]()  # the counters of a stage, at zero
    for one in tasks:
        for stage, nbytes in (*one.most.items(), *one.after.items()):
            names.setdefault(stage, {}).update(dict.fromkeys(nbytes, 0))
    for task, most, after in tasks:
        if (of := first.get(task)) is None:
            continue
        for at, by_stage in ((of.start, most), (of.end, after)):
            for stage, nbytes in by_stage.items():
                if stage in ipus and names[stage]:
                    name = f"stage {stage}, first step, this computer"
                    yield RecordedBytes(*ipus[stage], at, names[stage] | {**nbytes}, name)


def _ipu_of(instruction: Plain) -> int:
    if isinstance(instruction, Copy):
        return instruction.dst
    return next(iter(instruction.ipus), 0)


def _category(instruction: Plain, run: RunPass | None) -> str:
    for move in instruction.moves:
        return _CATEGORIES.get(move.how, "replicas")
    if isinstance(instruction, Call):
        return "function call"
    return "update" if run is None else "instruction"
