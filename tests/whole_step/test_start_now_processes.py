"""Check with a real compiler that steps run while another process compiles, and that it ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.inductor]

ROOT = Path(__file__).resolve().parents[2]
CAP = 300  # seconds, for a slow machine
# A compiler that waits for a file before it compiles a library; `echo` names its process.
COMPILER = """#!/bin/sh
case "$*" in
*-shared*)
  echo $$ > {folder}/asked.new && mv {folder}/asked.new {folder}/asked
  while [ ! -e {folder}/go ]; do sleep 0.05; done
  {then}
esac
exec {real} "$@"
"""
PROGRAM = """
import copy, json, logging, os, signal, sys, time
import torch
from torch import nn
from ipu_dynamo import Options, compile_training
from ipu_dynamo.runtime.engines import compiled_stages
from ipu_dynamo.runtime.engines.check import checks

folder = sys.argv[1]
warnings = []

class Noted(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())

logging.getLogger("ipu_dynamo").addHandler(Noted(logging.WARNING))

def wait_for(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.05)

def training(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Flatten(0))
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
        def forward(self, x):
            return nn.functional.mse_loss(self.model(x), x.flatten())
    whole = Loss()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05)
    return compile_training(whole, optimizer, Options(**options)), optimizer

torch.manual_seed(1)
calls = torch.randn(8, 4, 6)
step, optimizer = training(engine="inductor", start="now")
alone, _ = training(engine="eager")
same = [torch.equal(step(x), alone(x)) for x in calls[:4]]
"""
BINDS = """
before = dict(compiled_stages.origins)
wait_for("asked")
open(os.path.join(folder, "go"), "w").close()
step.read_optimizer_state()
states = copy.deepcopy((step.model.state_dict(), optimizer.state_dict()))
step.executable._later.wait()
losses = [step(x) for x in calls[4:]]
text = str(step.executable.host_program)
origins = dict(compiled_stages.origins)
checks.forget()  # so that the first call is checked again, as the first one of `step` was
for outcome in os.scandir(os.path.join(folder, "cache", "checks")):
    os.unlink(outcome)
again, optimizer = training(engine="inductor", start="now")
again.model.load_state_dict(states[0])
optimizer.load_state_dict(states[1])
same += [torch.equal(again(x), loss) for x, loss in zip(calls[4:], losses, strict=True)]
text += str(again.executable.host_program)
"""
FAILS = """
before = {}
wait_for("asked")
open(os.path.join(folder, "go"), "w").close()
step.executable._later.wait()
same += [torch.equal(step(x), alone(x)) for x in calls[4:]]
text, origins = str(step.executable.host_program), dict(compiled_stages.origins)
"""
SAY = """
with open(os.path.join(folder, "said"), "w") as file:
    json.dump([same, before, origins, warnings, text], file)
"""


def run(folder, program, then=""):
    """Start a program whose compiler is held back."""
    real = shutil.which("g++") or shutil.which("clang++")
    compiler = folder / Path(real).name
    compiler.write_text(COMPILER.format(folder=folder, then=then, real=real))
    compiler.chmod(0o700)
    named = {"CXX": str(compiler), "IPU_DYNAMO_CACHE_DIR": str(folder / "cache")}
    named |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "PYTHONPATH": str(ROOT)}
    with (folder / "errors").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            env=os.environ | named,
            stderr=errors,
            start_new_session=True,
        )


def said(folder, process):
    code = process.wait(CAP)
    assert code == 0, (folder / "errors").read_text()
    return json.loads((folder / "said").read_text())


def test_compiled_functions_take_over_and_the_parent_compiles_nothing(tmp_path):
    process = run(tmp_path, PROGRAM + BINDS + SAY)
    same, before, origins, warnings, text = said(tmp_path, process)
    assert same == [True] * 8
    assert before == {}
    assert origins.keys() == {"disk"}
    assert "compiled functions: from step 4 on" in text
    assert "repeated without Python" in text
    assert "CheckCompiled: checked" in text
    assert "compiled functions: from the first step on; there was nothing to compile" in text
    assert warnings == []


def test_training_goes_on_after_a_failing_compiler(tmp_path):
    process = run(tmp_path, PROGRAM + FAILS + SAY, "echo it is out of ideas >&2; exit 1")
    same, _, origins, (warning,), text = said(tmp_path, process)
    assert same == [True] * 8
    assert origins == {}
    assert "it is out of ideas" in warning
    assert "the engine failed" in text


ENDS = {
    "exit": "sys.exit(0)",
    "error": "raise ValueError",
    "Ctrl-C": "os.kill(os.getpid(), signal.SIGINT); time.sleep(1000)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_other_process_and_its_compiler_end_with_their_parent(tmp_path, end):
    child = "open(os.path.join(folder, 'child'), 'w').write("
    child += "str(step.executable._later._pending._process.pid))\nwait_for('asked')\n"
    process = run(tmp_path, PROGRAM + child + ENDS[end])
    process.wait(CAP)
    pids = [int((tmp_path / name).read_text()) for name in ("child", "asked")]
    assert all(map(is_gone, pids))


def is_gone(pid):
    """Wait until a process is gone, or has ended and waits for whoever reaps it."""
    ends = time.monotonic() + CAP
    while time.monotonic() < ends:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return False
