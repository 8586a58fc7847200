"""Check that changed files are refused, and that killed processes leave a whole file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import BeginBlock, StageSpec, Strategy, compile_training, save

ROOT = Path(__file__).parents[3]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)
        self.last.weight = nn.Parameter(torch.randn(5, 3).t())

    def forward(self, x, y, *, scale=1.0, names=("a", None)):
        h = self.last(F.dropout(torch.relu(self.norm(self.first(x))), 0.1)) * scale
        return F.cross_entropy(h, y), h


@pytest.fixture
def good(tmp_path):
    """A saved program with all kinds of parts, and a batch for it."""
    torch.manual_seed(0)
    model = Net()
    BeginBlock(model.first, "a", ipu_id=0)
    BeginBlock(model.last, "b", ipu_id=1)
    strategy = Strategy(kind="pipelined", stages=(StageSpec(("a",)), StageSpec(("b",))))
    options = {"engine": "eager", "strategy": strategy, "gradient_accumulation": 3, "seed": 1}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run = compile_training(model, optimizer, options | {"replicas": 2}, loss=0)
    batch = [torch.randn(24, 6), torch.randint(0, 3, (24,))]
    run(*batch)
    path = tmp_path / "program.saved"
    save(run, path)
    torch.save(batch, path.with_suffix(".batch"))
    return path


def treat(good, kind, count, seed=0):
    command = [sys.executable, "-m", "tests.whole_step.saving.rough", str(good), kind]
    done = subprocess.run(
        [*command, str(count), str(seed)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_changed_files_are_refused_or_change_nothing(good):
    assert "refused" in treat(good, "mutants", 100)


def test_a_killed_process_leaves_the_old_file_or_the_new_one(good):
    treat(good, "kills", 5)


@pytest.mark.slow
def test_many_changed_files(good):
    treat(good, "mutants", 10_000, 1)


@pytest.mark.slow
def test_many_killed_processes(good):
    found = treat(good, "kills", 100, 1)
    assert "old" in found
    assert "new" in found
