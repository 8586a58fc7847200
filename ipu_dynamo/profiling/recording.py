"""Keep the spans and counters of this process while somebody records them.

    from ipu_dynamo.profiling import recording

    with recording.span("RemoveDetach", "pass"):
        ...

A span goes to all recordings that are active, and is a row of PyTorch's profiler while that runs.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

from ipu_dynamo.profiling import trace_file
from ipu_dynamo.profiling.private.profiler import ProfilerRow, profiler_runs
from ipu_dynamo.profiling.trace_file import Event

LONGEST_TEXT = 300  # characters; an update of a large model has a name for each parameter
MOST_EVENTS = 1_000_000  # of a recording: half a gigabyte; later ones are counted only


class ThreadRow(NamedTuple):
    """A thread of this process, by the number that its system gives it."""

    number: int
    name: str


class WorkerRow(NamedTuple):
    """A worker that runs an IPU of a replica, for the calls of a thread."""

    replica: int
    ipu: int
    worker: int
    caller: ThreadRow


class RecordedSpan(NamedTuple):
    """Something that took from `start` to `end`, in seconds of `time.perf_counter`.

    Args:
        arguments: what else there is to know, by name; what is no JSON is written as text.
    """

    name: str
    category: str
    row: ThreadRow | WorkerRow
    start: float
    end: float
    arguments: Mapping[str, Any]


class RecordedBytes(NamedTuple):
    """Bytes of an IPU of a replica by kind, from a time on."""

    replica: int
    ipu: int
    time: float
    nbytes: Mapping[str, int]
    name: str = "bytes on this computer"


class RecordedLater(NamedTuple):
    """Counters that are made when the recording is written, as that takes time."""

    make: Callable[[], Iterable[RecordedBytes]]


class Recording:
    """Spans and counters in the order in which they end; any thread may add some.

    Attributes:
        left_out: how many were left out, as there are `MOST_EVENTS`.
    """

    def __init__(self) -> None:
        self._kept: list[RecordedSpan | RecordedBytes | RecordedLater] = []
        self.left_out = 0

    def add(self, one: RecordedSpan | RecordedBytes | RecordedLater) -> None:
        """Keep a span or a counter."""
        if len(self._kept) < MOST_EVENTS:
            self._kept.append(one)
        else:
            self.left_out += 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        return not self._kept

    def trace(self) -> dict[str, Any]:
        """The trace as JSON."""
        other = {"left out": self.left_out} if self.left_out else {}
        kept: list[RecordedSpan | RecordedBytes] = []
        for one in [*self._kept]:
            kept += one.make() if isinstance(one, RecordedLater) else (one,)
        return trace_file.trace_of(_Writer(kept).events(), unit="ms", other=other)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as a file, which appears as a whole.

        Raises:
            OSError: it cannot be written.
        """
        trace_file.write_trace_file(self.trace(), path)


class _Writer:
    """Makes processes and threads of rows: this process, and one for each IPU of each replica."""

    def __init__(self, kept: list[RecordedSpan | RecordedBytes]) -> None:
        self._kept = kept
        self._origin = min((_begin(one) for one in kept), default=0.0)
        self._process = os.getpid()
        rows = [one.row for one in kept if isinstance(one, RecordedSpan)]
        of_workers = {row for row in rows if isinstance(row, WorkerRow)}
        ipus = {(row.replica, row.ipu) for row in of_workers}
        ipus |= {(one.replica, one.ipu) for one in kept if isinstance(one, RecordedBytes)}
        self._replicas = len({replica for replica, _ in ipus})
        numbers = (n for n in range(1, len(ipus) + 2) if n != self._process)
        self._ipus = dict(zip(sorted(ipus), numbers, strict=False))
        self._threads = {row for row in rows if isinstance(row, ThreadRow)}
        # calls of several threads have workers of the same numbers
        pairs = sorted({(row.caller, row.worker) for row in of_workers}, key=lambda p: p[1])
        self._workers = {pair: number for number, pair in enumerate(pairs)}
        self._callers = len({caller for caller, _ in pairs})
        self._of_workers = of_workers

    def events(self) -> list[Event]:
        return [*self._names(), *map(self._event, self._kept)]

    def _names(self) -> list[Event]:
        events = trace_file.process_name(self._process, f"this computer, process {self._process}")
        for thread in sorted(self._threads):
            events.append(trace_file.thread_name(self._process, thread.number, thread.name))
        for place, ((replica, ipu), process) in enumerate(self._ipus.items(), 1):
            name = f"IPU {ipu}" + (f" of replica {replica}" if self._replicas > 1 else "")
            events += trace_file.process_name(process, name, place)
        for row in sorted(self._of_workers):
            name = f"worker {row.worker}"
            name += f" of {row.caller.name}" if self._callers > 1 else ""
            events.append(trace_file.thread_name(*self._place(row), name))
        return events

    def _event(self, one: RecordedSpan | RecordedBytes) -> Event:
        if isinstance(one, RecordedBytes):
            process, at = self._ipus[one.replica, one.ipu], self._nanoseconds(one.time)
            return trace_file.counter(one.name, process, at, one.nbytes)
        begin, end = self._nanoseconds(one.start), self._nanoseconds(one.end)
        return trace_file.span(
            one.name,
            *self._place(one.row),
            begin,
            end,
            category=one.category,
            arguments={name: _written(value) for name, value in one.arguments.items()},
        )

    def _place(self, row: ThreadRow | WorkerRow) -> tuple[int, int]:
        """The process and the thread of a row."""
        if isinstance(row, ThreadRow):
            return self._process, row.number
        return self._ipus[row.replica, row.ipu], self._workers[row.caller, row.worker]

    def _nanoseconds(self, seconds: float) -> int:
        return round((seconds - self._origin) * 1e9)


def _written(value: Any) -> Any:
    """A value as JSON: a number as it is, and a text at its beginning."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


def _begin(one: RecordedSpan | RecordedBytes) -> float:
    return one.time if isinstance(one, RecordedBytes) else one.start


active: tuple[Recording, ...] = ()  # read on its own where a call would cost too much
_changing = threading.Lock()


def begin(one: Recording) -> None:
    """Let a recording have what happens from now on."""
    global active
    with _changing:
        active = (*active, one)


def end(one: Recording) -> None:
    """End a recording; it has no effect on one that has ended."""
    global active
    with _changing:
        active = tuple(other for other in active if other is not one)


def _forget() -> None:
    """Record nothing in a fork of the process that records."""
    global active, _changing
    active, _changing = (), threading.Lock()


os.register_at_fork(after_in_child=_forget)


def this_thread() -> ThreadRow:
    """The row of the thread that calls this."""
    return ThreadRow(threading.get_native_id(), threading.current_thread().name)


class span:  # noqa: N801  a context manager, which reads as a function
    """Record a block as a span of this thread.

    Args:
        category: what kind of work it is.
        arguments: what else there is to know; may be added to within the block.
    """

    def __init__(self, name: str, category: str, **arguments: Any) -> None:
        self._name, self._category, self.arguments = name, category, arguments
        self._row: ProfilerRow | None = None
        self._start = 0.0

    def __enter__(self) -> "span":
        if profiler_runs():
            self._row = ProfilerRow(self._name)
            self._row.__enter__()
        self._start = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stop = perf_counter()
        if self._row is not None:
            self._row.__exit__(kind, error, traceback)
        if active:
            one = RecordedSpan(
                self._name, self._category, this_thread(), self._start, stop, self.arguments
            )
            for each in active:
                each.add(one)
