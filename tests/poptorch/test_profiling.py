"""Check that tracepoints are recorded with what runs, and change nothing otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ipu_dynamo
from ipu_dynamo.profiling import recording
from poptorch import profiling
from tests.profiling.strict_reader import read_trace

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    def double(self, x):
        return 2 * x

    def fail(self):
        raise KeyError


def test_nothing_is_recorded_unless_asked_for():
    assert not recording.active
    channel, worker = profiling.Channel("c"), Worker()
    assert channel.instrument(worker, "double", "missing") is worker
    assert vars(worker) == {}
    with channel.tracepoint("span"):
        pass


def test_spans_are_recorded_with_channel_and_duration(tmp_path):
    channel, worker = profiling.Channel("work"), Worker()
    with ipu_dynamo.profile(tmp_path / "deep" / "trace.json"):
        assert channel.instrument(worker, "double", "fail") is worker
        assert worker.double(4) == 8
        with pytest.raises(KeyError):
            worker.fail()
        with channel.tracepoint("outer"), channel.tracepoint("inner"):
            pass
    spans = read_trace(tmp_path / "deep" / "trace.json").spans
    assert [span["name"] for span in spans] == [
        "work.double",
        "work.fail",
        "work.inner",
        "work.outer",
    ]
    inner, outer = spans[2:]
    assert outer["begin"] <= inner["begin"] <= inner["end"] <= outer["end"]
    assert {span["pid"] for span in spans} == {os.getpid()}
    assert {span["cat"] for span in spans} == {"work"}


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"IPU_DYNAMO_TRACE": "mine.json", "PVTI_OPTIONS": '{"enable": "true"}'}, None),
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


PROGRAM = """
import torch, poptorch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(4, 4), "a", ipu_id=0)
        self.second = poptorch.BeginBlock(nn.Linear(4, 2), "b", ipu_id=1)

    def forward(self, x, y=None):
        out = self.second(torch.relu(self.first(x)))
        return out, nn.functional.cross_entropy(out, y)

options = poptorch.Options()
options.Training.gradientAccumulation(4)
model = Net()
training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    training(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
with poptorch.profiling.Channel("a").tracepoint("b"):
    pass
"""


def test_a_variable_records_a_program_as_it_is(tmp_path):
    file = tmp_path / "trace.json"
    environment = {**os.environ, "IPU_DYNAMO_TRACE": str(file), "PYTHONPATH": str(ROOT)}
    environment["IPU_DYNAMO_ENGINE"] = "eager"
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=120)
    trace = read_trace(file)
    assert {*trace.processes.values()} > {"IPU 0", "IPU 1"}
    assert [span["name"] for span in trace.of("call")] == ["training call"] * 2
    assert [span["name"] for span in trace.of("a")] == ["a.b"]
    assert {"Differentiate", "Emit", "FuseStep"} <= {span["name"] for span in trace.of("pass")}
    passes = trace.of("stage pass")
    assert len(passes) == len({span["begin"] for span in passes}) == 2 * 4 * 3
    assert trace.of("step")[0]["begin"] > trace.of("pass")[-1]["end"]


@pytest.mark.slow
def test_pvti_options_write_a_file_for_the_process(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PVTI_OPTIONS": '{"enable": "true"}'}
    environment.pop("IPU_DYNAMO_TRACE", None)
    code = "import poptorch\nwith poptorch.profiling.Channel('a').tracepoint('b'): pass"
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=120)
    (file,) = tmp_path.glob("*.trace.json")
    assert [span["name"] for span in read_trace(file).spans] == ["a.b"]
