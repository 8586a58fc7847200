"""Run the programs that the README shows."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M
)


def test_there_is_one_program_for_each_door():
    assert ['backend="ipu"' in program for program in PROGRAMS] == [True, False]
    assert ["import poptorch" in program for program in PROGRAMS] == [False, True]


@pytest.mark.parametrize("program", PROGRAMS, ids=["torch.compile", "poptorch"])
def test_the_program_runs_and_prints_a_loss(program, tmp_path):
    if 'backend="ipu"' in program and not entry_points(group="torch_dynamo_backends", name="ipu"):
        pytest.skip("ipu_dynamo is not installed; the tests run from the checkout")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    file = tmp_path / "program.py"
    file.write_text(program, encoding="utf-8")
    run = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(r"loss \d\.\d{3}\n", run.stdout)
