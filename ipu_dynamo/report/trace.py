"""Write the timeline of a prediction as Chrome's trace JSON, which Perfetto opens.

The trace has a track for each IPU, one for links and host, and one for the sections of a step. Each
section is there once; `count` in its arguments says how often it repeats. A call has its operators
inside, and the memory of its IPU as a counter.
"""

import os
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from ipu_dynamo.machine.predicted_time import TimelineSection, TimelineSpan
from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.machine.text import title
from ipu_dynamo.profiling import trace_file
from ipu_dynamo.profiling.trace_file import Event

MOST_EVENTS = 50_000
_PROCESS = 0
_FIRST_DETAILS = ("period",)  # sections whose operators are written first, while there is room


def write_trace(prediction: Prediction, path: str | os.PathLike[str]) -> None:
    """Write the trace of a prediction.

    Args:
        prediction: what `ipu_dynamo.predict` returns.
        path: of the trace, a JSON file.

    Raises:
        OSError: it cannot be written; a file that is there stays as it was.
    """
    trace_file.write_trace_file(trace(prediction), path)


def trace(prediction: Prediction) -> dict[str, Any]:
    """The trace as JSON. Times are in microseconds, rounded to whole nanoseconds."""
    sections = prediction.timeline
    begins = list(accumulate((section.cycles for section in sections), initial=0))
    placed = [
        (begin, section, span)
        for begin, section in zip(begins, sections, strict=False)
        for span in section.spans
    ]
    writer = _Writer(prediction)
    events = [*writer.tracks(), *map(writer.section, begins, sections)]
    room = MOST_EVENTS - len(events) - len(placed)
    if room < 0:
        problem = f"its timeline has {len(placed):,} spans; a trace has {MOST_EVENTS:,} at most"
        raise ValueError(problem)
    order = sorted(range(len(placed)), key=lambda i: placed[i][1].name not in _FIRST_DETAILS)
    details: dict[int, list[Event]] = {}
    left_out = 0
    for i in order:
        inside = list(writer.inside(placed[i][0], placed[i][2]))
        if len(inside) <= room:
            details[i] = inside
            room -= len(inside)
        else:
            left_out += 1
    for i, (begin, section, span) in enumerate(placed):
        events += [writer.span(begin, section, span), *details.get(i, ())]
    other = {
        "model": prediction.model,
        "system": prediction.system,
        "verdict": prediction.verdict.word,
        "command": prediction.reproduce.command,
        "calls without operators": left_out,
    }
    return trace_file.trace_of(events, unit="ns", other=other)


class _Writer:
    """Events of a prediction.

    Args:
        prediction: whose clock makes microseconds of cycles.
    """

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._memory = [
            {call.call: (call, ipu.memory.blocks[call.memory_block]) for call in ipu.memory.calls}
            for ipu in prediction.ipus
        ]

    def tracks(self) -> Iterator[Event]:
        """Names of the tracks."""
        num_ipus = len(self._prediction.ipus)
        named = [f"IPU {i}" for i in range(num_ipus)] + ["links, host", "sections of a step"]
        name = f"replica 0: {title(self._prediction)}"
        yield from trace_file.process_name(_PROCESS, name)
        for track, name in enumerate(named):
            yield trace_file.thread_name(_PROCESS, track, name)

    def section(self, begin: int, section: TimelineSection) -> Event:
        """A section, on the last track."""
        track = len(self._prediction.ipus) + 1
        arguments = {"count": section.count, "cycles": section.cycles}
        name = section.name if section.count == 1 else f"{section.name} x {section.count}"
        return self._event(name, track, begin, section.cycles, arguments)

    def span(self, begin: int, section: TimelineSection, span: TimelineSpan) -> Event:
        """A call, a copy, or other work."""
        arguments: dict[str, Any] = {"cycles": span.cycles, "work": span.work}
        if section.count > 1:
            arguments["count"] = section.count
        if span.micro_batch >= 0:
            arguments["micro-batch"] = span.micro_batch
        if span.call >= 0 and (line := self._prediction.calls[span.call].line):
            arguments["line"] = line
        track = span.track if span.track >= 0 else len(self._prediction.ipus)
        return self._event(span.name, track, begin + span.start, span.cycles, arguments)

    def inside(self, begin: int, span: TimelineSpan) -> Iterator[Event]:
        """The operators of a call, one after the other, and its memory where it changes."""
        if span.call < 0 or span.track < 0:
            return
        rows = self._prediction.operators
        block = self._prediction.blocks[self._prediction.calls[span.call].block]
        at, memory = begin + span.start, list(self._bytes(span))
        for step, number in enumerate(block.operators):
            row = rows[number]
            if step < len(memory) and (step == 0 or memory[step] != memory[step - 1]):
                yield self._counter(span.track, at, memory[step])
            arguments = {"cycles": row.cycles.total, "line": row.line}
            yield self._event(row.operator, span.track, at, row.cycles.total, arguments)
            at += row.cycles.total

    def _bytes(self, span: TimelineSpan) -> Iterator[dict[str, int]]:
        """Bytes on the IPU at each step of a call."""
        if span.call not in self._memory[span.track]:
            return
        call, block = self._memory[span.track][span.call]
        always = self._prediction.ipus[span.track].memory.always_live.central
        for activations, temporaries in zip(block.activations, block.temporaries, strict=True):
            yield {
                "always live": always,
                "activations": call.held + activations,
                "temporaries": temporaries,
            }

    def _event(
        self, name: str, track: int, begin: int, cycles: int, arguments: dict[str, Any]
    ) -> Event:
        ends = self._nanoseconds(begin + cycles)
        return trace_file.span(
            name, _PROCESS, track, self._nanoseconds(begin), ends, arguments=arguments
        )

    def _counter(self, ipu: int, at: int, nbytes: dict[str, int]) -> Event:
        name = f"bytes of IPU {ipu}"
        return trace_file.counter(name, _PROCESS, self._nanoseconds(at), nbytes)

    def _nanoseconds(self, cycles: int) -> int:
        return round(1e9 * cycles / self._prediction.clock)
