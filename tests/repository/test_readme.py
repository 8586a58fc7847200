"""Run the programs that the README shows."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.docs.figures import with_figures

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M
)


README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST = README.splitlines()[:70]
ROWS = {
    cells[0].strip(): re.findall(r"`(.*?)`", cells[1])
    for line in FIRST
    if (cells := line.strip("| ").split(" | ")) and len(cells) == 2 and cells[0] != "---"
}  # the table of what readers write: the code of each row
FINDS = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x
model, x = Net(), torch.randn(3, 4)
expected = model(x).detach()
"""
COMPARES = "print((found.detach() - expected).abs().max().item() < 1e-5)"
COMPLETED = {
    "a PopTorch program": FINDS + "{0}\nfound = poptorch.inferenceModel(model)(x)\n" + COMPARES,
    "a PyTorch model": FINDS + "{0}\nfound = model(x)\n" + COMPARES,
    "a Hugging Face model": FINDS
    + "from ipu_dynamo.optimum import IPUConfig, parallelize\n{0}\n"
    + "model = torch.compile(model, backend='ipu')\nfound = model(x)\n"
    + COMPARES,
    "a Keras 3 model": """{0}
{1}
import numpy
x = numpy.random.default_rng(0).random((32, 4), "float32")
def made():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Dense(3)])
expected = made().predict(x, verbose=0)
{2}
    found = made().predict(x, verbose=0)
print(abs(found - expected).max() < 1e-5)
""",
}


def test_the_first_lines_have_what_a_reader_looks_for():
    paragraph = " ".join(README.split("\n\n")[1].split())
    assert len(paragraph.split()) <= 40
    assert "IPUs, Graphcore's processors" in paragraph
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", "\n".join(FIRST))
    assert (ROOT / picture).is_file()
    assert [*ROWS] == ["You have", *COMPLETED]
    assert all(any(command in line for line in FIRST) for command in ("make run", "make test"))
    assert not re.findall(r"\bdoors?\b|virtual IPU|machine model", README)


def test_figures_are_those_of_the_pages():
    assert with_figures(README) == README, "`python -m tests.docs.guide README` writes them"


@pytest.mark.parametrize("has", [*COMPLETED][:-1])
def test_what_readers_write_computes_what_the_plain_model_does(has, capsys, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    exec(COMPLETED[has].format(*ROWS[has]), {"__name__": "readers_program"})
    assert capsys.readouterr().out == "True\n"


def test_what_readers_write_for_keras_computes_what_plain_keras_does(tmp_path):
    has, file = [*COMPLETED][-1], tmp_path / "program.py"  # it chooses what Keras imports
    file.write_text(COMPLETED[has].format(*ROWS[has]), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "IPU_DYNAMO_ENGINE": "eager"}
    run = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    assert run.stdout == "True\n", run.stderr


def test_there_is_one_program_for_each_front_end():
    assert ['backend="ipu"' in program for program in PROGRAMS] == [True, False]
    assert ["import poptorch" in program for program in PROGRAMS] == [False, True]


@pytest.mark.parametrize("program", PROGRAMS, ids=["torch.compile", "poptorch"])
def test_the_program_runs_and_prints_a_loss(program, tmp_path):
    if 'backend="ipu"' in program and not entry_points(group="torch_dynamo_backends", name="ipu"):
        pytest.skip("ipu_dynamo is not installed; the tests run from the checkout")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if "import poptorch" in program:
        environment["IPU_DYNAMO_ENGINE"] = "eager"  # one of the two is compiled
    file = tmp_path / "program.py"
    file.write_text(program, encoding="utf-8")
    run = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(r"loss \d\.\d{3}\n", run.stdout)
