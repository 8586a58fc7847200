"""Read a trace strictly: each event has the fields of the Trace Event Format, and no others."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_COMMON = {"ph", "name", "pid", "args"}
_FIELDS = {
    "X": _COMMON | {"cat", "tid", "ts", "dur"},
    "C": _COMMON | {"ts"},
    "M": _COMMON | {"tid"},
}
_METADATA = {"process_name": str, "process_sort_index": int, "thread_name": str}


@dataclass
class Trace:
    """A trace that was read.

    Attributes:
        processes, threads: their names, by number.
        spans: in the order of the file, each with `begin` and `end` in nanoseconds.
    """

    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)
    counters: list[dict[str, Any]] = field(default_factory=list)

    def of(self, category: str) -> list[dict[str, Any]]:
        """The spans of a category, by time."""
        chosen = [span for span in self.spans if span["cat"] == category]
        return sorted(chosen, key=lambda span: (span["begin"], -span["end"]))

    def process_of(self, span: dict[str, Any]) -> str:
        return self.processes[span["pid"]]

    def thread_of(self, span: dict[str, Any]) -> str:
        return self.threads[span["pid"], span["tid"]]


def read_trace(path: Path) -> Trace:
    """Read a trace file.

    Raises:
        AssertionError: something in it is wrong.
    """
    content = json.loads(path.read_text("ascii"), parse_constant=_refuse)
    assert content.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    trace = Trace()
    for event in content["traceEvents"]:
        _check(event)
        match event["ph"]:
            case "M" if event["name"] == "process_name":
                assert event["pid"] not in trace.processes, "two names of a process"
                trace.processes[event["pid"]] = event["args"]["name"]
            case "M" if event["name"] == "thread_name":
                place = event["pid"], event["tid"]
                assert place not in trace.threads, "two names of a thread"
                trace.threads[place] = event["args"]["name"]
            case "C":
                trace.counters.append(event)
            case "X":
                begin, length = round(1000 * event["ts"]), round(1000 * event["dur"])
                trace.spans.append(event | {"begin": begin, "end": begin + length})
    assert all((span["pid"], span["tid"]) in trace.threads for span in trace.spans)
    assert all(one["pid"] in trace.processes for one in (*trace.spans, *trace.counters))
    assert len(set(trace.processes.values())) == len(trace.processes)
    check_nesting(trace.spans)
    return trace


def _refuse(constant: str) -> None:
    raise AssertionError(f"no JSON: {constant}")


def _check(event: dict[str, Any]) -> None:
    assert event.keys() == _FIELDS[event["ph"]], event
    assert isinstance(event["name"], str), event
    assert event["name"], event
    assert isinstance(event["args"], dict), event
    for number in ("pid", "tid"):
        assert type(event.get(number, 0)) is int, event
    for time in ("ts", "dur"):
        assert math.isfinite(event.get(time, 0)), event
        assert event.get(time, 0) >= 0, event
    if event["ph"] == "C":
        assert event["args"], event
        assert all(type(value) is int and value >= 0 for value in event["args"].values()), event
    if event["ph"] == "M":
        (value,) = event["args"].values()
        assert type(value) is _METADATA[event["name"]], event


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """Check that spans of a thread nest: Perfetto draws no others."""
    of_threads = defaultdict(list)
    for span in spans:
        of_threads[span["pid"], span["tid"]].append(span)
    for of in of_threads.values():
        around: list[dict[str, Any]] = []
        for span in sorted(of, key=lambda one: (one["begin"], -one["end"])):
            while around and around[-1]["end"] <= span["begin"]:
                around.pop()
            assert not around or span["end"] <= around[-1]["end"], (around[-1], span)
            around.append(span)
