"""Check that what is alive when the interpreter ends says nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXECUTOR = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x), "sum")

model = Model()
kept = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))
"""
TRANSFER = """
kept = DatasetTransfer([1], by_disk=False)
kept._files.append(os.dup(1))
"""
PROGRAM = """
import os
import sys
import torch
import poptorch
from ipu_dynamo.batches.pickling import DatasetTransfer
{made}
# modules that something holds lose their names, this one after the others
sys.kept = list(sys.modules.values())
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("made", [EXECUTOR, TRANSFER], ids=["executor", "transfer"])
def test_what_outlives_the_names_of_modules_says_nothing(made):
    command = [sys.executable, "-c", PROGRAM.replace("{made}", made)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")
