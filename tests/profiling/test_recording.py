"""Check what recordings keep, and the files that they write."""

import os

import torch

from ipu_dynamo.profiling import recording
from ipu_dynamo.profiling.recording import (
    RecordedBytes,
    RecordedSpan,
    Recording,
    ThreadRow,
    WorkerRow,
)
from ipu_dynamo.profiling.trace_file import write_trace_file
from ipu_dynamo.report.trace import trace
from tests.profiling.strict_reader import read_trace
from tests.report.predictions import drawn_prediction

MAIN, OTHER = ThreadRow(71, "MainThread"), ThreadRow(72, "other")


def read(one, folder):
    one.write(folder / "trace.json")
    return read_trace(folder / "trace.json")


def test_each_ipu_is_a_process_and_each_worker_a_thread(tmp_path):
    made = Recording()
    rows = [WorkerRow(r, i, w, MAIN) for r, i, w in ((1, 0, 0), (0, 1, 1), (0, 0, 0))]
    for place, row in enumerate((*rows, MAIN)):
        made.add(RecordedSpan(f"span {place}", "c", row, place, place + 0.5, {"n": place}))
    made.add(RecordedBytes(0, 2, 7.0, {"variables": 8}))
    found = read(made, tmp_path)
    assert [found.process_of(span) for span in found.spans] == [
        "IPU 0 of replica 1",
        "IPU 1 of replica 0",
        "IPU 0 of replica 0",
        f"this computer, process {os.getpid()}",
    ]
    assert [found.thread_of(span) for span in found.spans] == [
        "worker 0",
        "worker 1",
        "worker 0",
        "MainThread",
    ]
    assert found.processes[found.counters[0]["pid"]] == "IPU 2 of replica 0"
    assert [span["begin"] for span in found.spans] == [0, 10**9, 2 * 10**9, 3 * 10**9]
    assert [span["args"] for span in found.spans] == [{"n": place} for place in range(4)]


def test_calls_of_two_threads_at_once_have_rows_of_their_own(tmp_path):
    made = Recording()
    for caller in (MAIN, OTHER):
        made.add(RecordedSpan("a", "c", WorkerRow(0, 0, 0, caller), 0.0, 1.0, {}))
        made.add(RecordedSpan("b", "c", WorkerRow(0, 0, 0, caller), 0.5, 1.0, {}))
    found = read(made, tmp_path)
    assert {found.thread_of(span) for span in found.spans} == {
        "worker 0 of MainThread",
        "worker 0 of other",
    }


def test_spans_go_to_all_active_recordings():
    outer, inner = Recording(), Recording()
    recording.begin(outer)
    try:
        with recording.span("first", "c"):
            pass
        recording.begin(inner)
        with recording.span("second", "c") as span:
            span.arguments["found"] = 3
        recording.end(inner)
        with recording.span("third", "c"):
            pass
    finally:
        recording.end(outer)
    with recording.span("fourth", "c"):
        pass
    assert recording.active == ()
    names = [
        [event["name"] for event in made.trace()["traceEvents"] if event["ph"] == "X"]
        for made in (outer, inner)
    ]
    assert names == [["first", "second", "third"], ["second"]]
    assert inner.trace()["traceEvents"][-1]["args"] == {"found": 3}


def test_a_full_recording_says_how_much_it_left_out(monkeypatch):
    monkeypatch.setattr(recording, "MOST_EVENTS", 3)
    made = Recording()
    for place in range(5):
        made.add(RecordedSpan("a", "c", MAIN, place, place, {}))
    assert made.trace()["otherData"] == {"left out": 2}
    assert sum(event["ph"] == "X" for event in made.trace()["traceEvents"]) == 3


def test_arguments_are_numbers_or_the_beginnings_of_texts(tmp_path):
    made = Recording()
    arguments = {"n": 3, "share": 0.5, "is": True, "none": None, "what": MAIN, "long": "ab" * 999}
    made.add(RecordedSpan("a", "c", MAIN, 0.0, 1.0, arguments))
    (span,) = read(made, tmp_path).spans
    long = "ab" * (recording.LONGEST_TEXT // 2) + " ..."
    assert span["args"] == arguments | {"what": str(MAIN), "long": long}


def test_a_span_is_a_row_of_a_profiler_and_no_part_of_a_graph():
    def doubled(x):
        with recording.span("my span", "c"):
            return 2 * x

    with torch.profiler.profile() as profiler:
        graph = torch.fx.experimental.proxy_tensor.make_fx(doubled)(torch.ones(2))
    assert [row.count for row in profiler.key_averages() if row.key == "my span"] == [1]
    assert "profiler" not in graph.code


def test_the_trace_of_a_prediction_is_read_strictly(tmp_path):
    write_trace_file(trace(drawn_prediction(ipus=3)), tmp_path / "trace.json")
    assert len(read_trace(tmp_path / "trace.json").spans) > 20
