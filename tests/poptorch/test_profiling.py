"""Check that tracepoints are recorded where the environment asks for it, and change nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from poptorch import profiling

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    def double(self, x):
        return 2 * x

    def fail(self):
        raise KeyError


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    recorder = profiling._Recorder(tmp_path / "deep" / "trace.json")
    monkeypatch.setattr(profiling, "_recorder", recorder)
    return recorder


def test_nothing_is_recorded_unless_asked_for(monkeypatch):
    monkeypatch.setattr(profiling, "_recorder", profiling._Recorder(None))
    channel, worker = profiling.Channel("c"), Worker()
    assert channel.instrument(worker, "double", "missing") is worker
    assert vars(worker) == {}
    with channel.tracepoint("span"):
        pass
    assert profiling._recorder._events == []


def test_spans_are_recorded_with_channel_and_duration(recorder, tmp_path):
    channel, worker = profiling.Channel("work"), Worker()
    assert channel.instrument(worker, "double", "fail") is worker
    assert worker.double(4) == 8
    with pytest.raises(KeyError):
        worker.fail()
    with channel.tracepoint("outer"), channel.tracepoint("inner"):
        pass
    recorder.write()
    events = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names == ["work.double", "work.fail", "work.inner", "work.outer"]
    inner, outer = events[2:]
    assert outer["ts"] <= inner["ts"]
    assert outer["dur"] >= inner["dur"] >= 0
    assert {event["pid"] for event in events} == {os.getpid()}


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"IPU_DYNAMO_TRACE": "mine.json"}, "mine.json"),
        ({"PVTI_OPTIONS": '{"enable": "true"}'}, "PID.trace.json"),
        (
            {"PVTI_OPTIONS": '{"enable": "true", "directory": "sub"}'},
            "sub/PID.trace.json",
        ),
        ({"PVTI_OPTIONS": '{"enable": "false"}'}, None),
        ({"PVTI_OPTIONS": "no JSON"}, None),
        ({}, None),
    ],
)
def test_the_environment_names_the_file(monkeypatch, tmp_path, variables, name):
    monkeypatch.chdir(tmp_path)
    for variable in ("IPU_DYNAMO_TRACE", "PVTI_OPTIONS"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    wanted = name and tmp_path / name.replace("PID", str(os.getpid()))
    assert profiling._path() == wanted


def test_the_trace_is_complete_at_the_end_of_the_process(tmp_path):
    code = "import poptorch\nwith poptorch.profiling.Channel('a').tracepoint('b'): pass"
    file = tmp_path / "trace.json"
    environment = {**os.environ, "IPU_DYNAMO_TRACE": str(file), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert [event["name"] for event in json.loads(file.read_text())["traceEvents"]] == ["a.b"]
