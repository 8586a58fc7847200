"""Write files in Chrome's Trace Event Format, which Perfetto opens.

A trace has processes, and each of them has threads. Spans on a thread nest and do not overlap.
Source: "Trace Event Format", the document of the Chromium project.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ipu_dynamo.replace_file import replacing

Event = dict[str, Any]


def span(
    name: str,
    process: int,
    thread: int,
    begin: int,
    end: int,
    *,
    category: str = "",
    arguments: Mapping[str, Any] | None = None,
) -> Event:
    """A span of a thread.

    Args:
        begin, end: in nanoseconds since the beginning of the trace.
        arguments: what Perfetto shows of the span once it is selected.
    """
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": dict(arguments or {}),
    }


def counter(name: str, process: int, at: int, values: Mapping[str, int]) -> Event:
    """Values of a process from a time on, in nanoseconds; Perfetto stacks them."""
    return {"ph": "C", "name": name, "pid": process, "ts": at / 1000, "args": dict(values)}


def process_name(process: int, name: str, place: int = 0) -> list[Event]:
    """The name of a process, and its place among the processes."""
    return [
        _metadata("process_name", process, 0, name=name),
        _metadata("process_sort_index", process, 0, sort_index=place),
    ]


def thread_name(process: int, thread: int, name: str) -> Event:
    """The name of a thread."""
    return _metadata("thread_name", process, thread, name=name)


def _metadata(what: str, process: int, thread: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}


def trace_of(
    events: Sequence[Event], *, unit: Literal["ms", "ns"], other: Mapping[str, Any]
) -> dict[str, Any]:
    """A whole trace.

    Args:
        unit: in which Perfetto shows times.
        other: what else there is to know.
    """
    return {"traceEvents": [*events], "displayTimeUnit": unit, "otherData": dict(other)}


def write_trace_file(trace: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a trace as one file, which appears as a whole.

    Raises:
        OSError: it cannot be written; a file that is there stays as it was.
    """
    content = json.dumps(trace, separators=(",", ":"), allow_nan=False)
    with replacing(path) as file:
        file.write(content.encode("ascii"))
