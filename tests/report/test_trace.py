"""Check the trace: spans nest, do not overlap on a track, and add up to the prediction."""

import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.report.trace import MOST_EVENTS, trace, write_trace
from tests.report.predictions import drawn_prediction

SIZES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 99),
        "ipus": st.integers(1, 5),
        "rows": st.integers(1, 12),
        "layers": st.integers(1, 3),
    }
)


def nanoseconds(event):
    begin, length = round(1000 * event["ts"]), round(1000 * event["dur"])
    return begin, begin + length


def spans_of(events):
    """The spans of each track, in their order."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
    return tracks


def nesting_faults(spans):
    """The spans of a track that end after the one around them."""
    around = []
    for span in spans:
        begin, end = nanoseconds(span)
        while around and around[-1] <= begin:
            around.pop()
        if around and end > around[-1]:
            yield span
        around.append(end)


@given(SIZES)
def test_spans_nest_and_do_not_overlap_on_a_track(sizes):
    for spans in spans_of(trace(drawn_prediction(**sizes))["traceEvents"]).values():
        assert not [*nesting_faults(spans)]


@given(SIZES)
def test_spans_add_up_to_the_prediction(sizes):
    prediction = drawn_prediction(**sizes)
    made = trace(prediction)
    assert made["otherData"]["calls without operators"] == 0
    tracks = spans_of(made["traceEvents"])
    sections = tracks.pop(len(prediction.ipus) + 1)
    assert sum(s["args"]["cycles"] * s["args"]["count"] for s in sections) == prediction.cycles
    for number, ipu in enumerate(prediction.ipus):
        outer = [span for span in tracks[number] if "work" in span["args"]]
        inner = [span for span in tracks[number] if "work" not in span["args"]]
        busy = sum(span["args"]["cycles"] * span["args"].get("count", 1) for span in outer)
        assert busy == ipu.cycles.busy
        of_calls = [span for span in outer if span["args"]["work"] == "call"]
        assert sum(span["args"]["cycles"] for span in inner) == sum(
            span["args"]["cycles"] for span in of_calls
        )
        assert 16 * sum(s["args"]["cycles"] for s in inner) == ipu.cycles.operators.total


def test_times_are_cycles_of_the_clock():
    prediction = drawn_prediction()
    events = trace(prediction)["traceEvents"]
    for span in (event for event in events if event["ph"] == "X"):
        assert span["dur"] == pytest.approx(
            1e6 * span["args"]["cycles"] / prediction.clock, abs=2e-3
        )


def test_counters_have_the_memory_at_the_peak():
    prediction = drawn_prediction()
    events = trace(prediction)["traceEvents"]
    for number, ipu in enumerate(prediction.ipus):
        name = f"bytes of IPU {number}"
        counts = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["name"] == name]
        assert max(counts) == ipu.memory.total.central


def test_tracks_are_named():
    events = trace(drawn_prediction(ipus=2))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    assert names == ["IPU 0", "IPU 1", "links, host", "sections of a step"]


def test_a_large_trace_leaves_operators_out_and_says_so():
    prediction = drawn_prediction(ipus=8, rows=400, layers=12)
    made = trace(prediction)
    assert len(made["traceEvents"]) <= MOST_EVENTS
    left_out = made["otherData"]["calls without operators"]
    calls = [e for e in made["traceEvents"] if e.get("args", {}).get("work") == "call"]
    assert 0 < left_out < len(calls) == 16


def test_a_written_trace_reads_back(tmp_path):
    file = tmp_path / "trace.json"
    write_trace(drawn_prediction(), file)
    assert json.loads(file.read_text("ascii")) == trace(drawn_prediction())
