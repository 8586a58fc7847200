"""Check the artifacts of a trace, and the file of operators in a dump."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo.ops.private.structured_trace import LazyTraceHandler, is_tracing
from ipu_dynamo.passes import level_text
from ipu_dynamo.passes.dump import DUMP, OPERATORS
from ipu_dynamo.passes.level_text import parse_level, write_level
from ipu_dynamo.program import Program
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.runtime.execute.executable import Executable

ROOT = Path(__file__).resolve().parent.parent
TLPARSE = shutil.which("tlparse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
TRAIN = """
import torch, ipu_dynamo
from ipu_dynamo.torch_compile.backend import ipu
from tests.models import CASES

(case,) = (case for case in CASES if case.name == "cnn")
model, batch = case.build()
case.place(model, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
options = {"engine": "eager", "gradient_accumulation": 3}
options["strategy"] = ipu_dynamo.Strategy(kind="pipelined")
ipu_dynamo.compile_training(model, sgd, options, loss=0)(**batch)
torch.compile(torch.nn.Linear(4, 3), backend=ipu, options={"engine": "eager"})(
    torch.ones(2, 4)
).sum().backward()
"""
_ENTRY = re.compile(r"V\S+ \S+ \d+ \S+\] (\{.*\})")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")
_CALL = re.compile(r"^ +%\S+: .*? = ([\w.]+)\(", re.MULTILINE)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folders of the trace and the dump of a process that trains through both front ends."""
    trace, dump = (tmp_path_factory.mktemp(name) for name in ("trace", "dump"))
    environment = os.environ | {"TORCH_TRACE": str(trace), DUMP: str(dump)}
    subprocess.run([sys.executable, "-c", TRAIN], cwd=ROOT, env=environment, check=True)
    return trace, dump


class Artifact(NamedTuple):
    name: str
    encoding: str
    frame: int | None
    payload: str


@pytest.fixture(scope="module")
def artifacts(run):
    """Our artifacts, in their order."""
    (file,) = run[0].iterdir()
    found = []
    for line in file.read_text().splitlines():
        if entry := _ENTRY.fullmatch(line):
            found.append((json.loads(entry[1]), []))
        else:
            found[-1][1].append(line.removeprefix("\t"))
    return [
        Artifact(**record["artifact"], frame=record.get("frame_id"), payload="\n".join(payload))
        for record, payload in found
        if record.get("artifact", {}).get("name", "").startswith("ipu_")
    ]


def payloads(artifacts, name):
    return [artifact.payload for artifact in artifacts if artifact.name == name]


def patched(text, diff):
    """`text` after a unified difference."""
    lines, result, place = text.splitlines(), [], 0
    for line in diff[2:]:
        if hunk := _HUNK.fullmatch(line):
            start = int(hunk[1]) - (hunk[2] != "0")
            result += lines[place:start]
            place = start
        elif line[0] == "+":
            result.append(line[1:])
        else:
            assert lines[place] == line[1:]
            result += [line[1:]] if line[0] == " " else []
            place += 1
    return "\n".join([*result, *lines[place:], ""])


def test_payloads_parse(artifacts):
    assert len(artifacts) >= 7
    kinds = Counter()
    for name, encoding, _, text in artifacts:
        kind = name if name.count("_") < 3 else "passes" if encoding == "json" else "graphs"
        kinds[kind] += 1
        match kind:
            case "passes":
                assert json.loads(text).keys() == {"pass", "level", "came", "went", "diff"}
            case "ipu_decisions":
                assert all({"by", "choice", "reason"} <= one.keys() for one in json.loads(text))
            case "ipu_program":
                assert Program.parse(text).text() == text
            case "ipu_schedule":
                assert str(Schedule.parse(text)) == text
            case "ipu_schedule_drawn":
                (schedule,) = payloads(artifacts, "ipu_schedule")
                assert Schedule.parse(schedule).svg() == text
            case "ipu_memory":
                assert text.startswith("stage (this computer)  weights")
            case "ipu_memory_drawn":
                assert text.startswith("<svg")
                assert "this computer: peak" in text
            case "ipu_host_plan":
                assert "\nrecipe " in text or text.startswith("host program: eager on cpu")
            case "graphs" if name != "ipu_captured_00_captured":  # it has functions of Python
                assert write_level(parse_level(text)) == text
    assert kinds.pop("passes") >= 20
    each = dict.fromkeys(("ipu_program", "ipu_decisions", "ipu_host_plan"), 3)
    drawn = ("ipu_schedule", "ipu_schedule_drawn", "ipu_memory", "ipu_memory_drawn")
    assert kinds == {"graphs": 5, **dict.fromkeys(drawn, 1), **each}


def test_differences_lead_from_the_first_graph_to_the_program(artifacts):
    (text,) = payloads(artifacts, "ipu_training_00_traced")
    for name, encoding, _, payload in artifacts:
        if name.endswith("_InlineWrites"):
            break
        if name.startswith("ipu_training_") and encoding == "json":
            text = patched(text, json.loads(payload)["diff"])
    assert text == payloads(artifacts, "ipu_program")[0]


def test_artifacts_of_dynamos_graphs_have_its_numbers(artifacts):
    frames = {artifact.name: artifact.frame for artifact in artifacts}
    assert frames["ipu_training_00_traced"] is None
    assert frames["ipu_forward_00_flat"] == frames["ipu_backward_00_flat"] == 0


@pytest.mark.skipif(TLPARSE is None, reason="tlparse is not installed")
def test_tlparse_shows_them(run, artifacts, tmp_path):
    (file,), folder = run[0].iterdir(), tmp_path / "shown"
    command = [TLPARSE, "--strict", "--no-browser", "-o", folder, file]
    subprocess.run(command, check=True, capture_output=True)
    page = (folder / "index.html").read_text()
    shown = {
        re.sub(r"_\d+$", "", path.stem): path for path in folder.rglob("ipu_*") if path.name in page
    }
    assert shown.keys() == {artifact.name for artifact in artifacts}
    assert [shown["ipu_schedule"].read_text()] == payloads(artifacts, "ipu_schedule")


def test_a_dump_says_which_operators_came_and_went(run):
    (folder,) = run[1].glob("*_training")
    lines = dict(line.split(maxsplit=1) for line in (folder / OPERATORS).read_text().splitlines())
    files = [file for file in sorted(folder.glob("*_*.txt")) if _has_operators(file.read_text())]
    assert {"Differentiate", "RemoveDetach"} <= {name.partition("_")[2] for name in lines}
    for before, after in pairwise(files):
        counts = Counter(called(after.read_text()))
        counts.subtract(called(before.read_text()))
        signs = re.findall(r"(?<=[+-] )[^+-]+|[+-](?= )", lines.get(after.stem, ""))
        told = {}
        for sign, listed in zip(signs[::2], signs[1::2], strict=True):
            for part in listed.split(","):
                count, name = part.split()
                told[name] = int(f"{sign}{count}")
        assert told == {name: count for name, count in counts.items() if count}, after.stem


def _has_operators(text):
    return text.startswith(("ipu_dynamo traced, ", "ipu_dynamo joint, "))


def called(text):
    return [name.removesuffix(".default") for name in _CALL.findall(text)]


def test_no_text_is_made_without_a_reader(monkeypatch):
    trace = logging.getLogger("torch.__trace")
    monkeypatch.setattr(trace, "handlers", [LazyTraceHandler(None)])  # as PyTorch begins
    monkeypatch.delattr(level_text, "write_level")
    monkeypatch.delattr(Program, "text")
    monkeypatch.delattr(Executable, "host_plan")
    monkeypatch.delenv(DUMP, raising=False)
    assert not is_tracing()
    ipu_dynamo.compile_inference(nn.Linear(4, 3), {"engine": "eager"})(torch.ones(2, 4))
