"""Tell who wants to know of each step of a call when it begins and when it is complete."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from ipu_dynamo.program import Call
from ipu_dynamo.program.schedule.schedule import Task
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.host_io.print_queue import PrintedStream
from ipu_dynamo.runtime.execute.memory.step_records import StepRecords
from ipu_dynamo.runtime.execute.memory.storage import Storage
from ipu_dynamo.runtime.execute.timeline import Timeline


class StepWatch:
    """Who wants to know of each step: while there is somebody, steps are made one by one.

    Args:
        call: the one of a step.
        registers: of variables, by name.
    """

    def __init__(
        self,
        storage: Storage,
        call: Call,
        registers: Mapping[str, int],
        streams: HostStreams,
        timeline: Timeline | None,
        records: StepRecords | None,
        complete: Callable[[int], None] | None,
    ) -> None:
        self._storage, self._call, self._times = storage, call, streams.times
        self._registers = registers
        self._timeline, self._records, self._complete = timeline, records, complete
        prints = any(isinstance(values, PrintedStream) for values in streams.sent)
        self.looks = prints or any(
            who is not None for who in (timeline, records, complete, streams.times)
        )
        self._start = 0.0

    def before(self, step: int, frame: Sequence[Any]) -> None:
        """A step begins; the first registers hold variables."""
        if self._records is not None:
            self._records.note("before", step, self._reading(frame))
        self._start = perf_counter()
        if self._times is not None:
            self._times.received[step] = self._start, self._start

    def after(self, step: int, frame: Sequence[Any]) -> None:
        """A step is complete."""
        end = perf_counter()
        if self._timeline is not None:
            task = Task(step, 0, 0, 0)
            self._timeline.add(0, self._call, task, self._start, end)
        if self._times is not None:
            self._times.sent[step] = end, end
        if self._records is not None:
            self._records.note("after", step, self._reading(frame))
        if self._complete is not None:
            self._complete(step)

    def _reading(self, frame: Sequence[Any]) -> Callable[[str, int], Tensor]:
        registers, known = self._registers, len(frame)

        def read(name: str, replica: int) -> Tensor:
            register = registers.get(name, known)
            if register >= known:
                return self._storage.tensor(name, replica)
            tensor: Tensor = frame[register]
            return tensor

        return read
