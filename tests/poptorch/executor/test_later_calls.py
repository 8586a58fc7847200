"""Check how much of the project a later call of an executor runs through."""

import sys
from pathlib import Path

import torch
from torch import nn

import ipu_dynamo
import poptorch

ROOT = Path(ipu_dynamo.__file__).resolve().parents[1]
FOLDERS = ("ipu_dynamo", "passes", "runtime", "poptorch")


class Training(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, y):
        out = self.net(x)
        return out, nn.functional.cross_entropy(out, y)


def entered_by(action):
    """The files of the project that an action enters, each with the number of its calls."""
    entered: dict[str, int] = {}

    def profile(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_absolute():
            path = path.resolve()
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS:
                name = str(path.relative_to(ROOT))
                entered[name] = entered.get(name, 0) + 1

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return entered


def test_a_second_call_runs_through_few_files():
    net = Training()
    options = poptorch.Options().showCompilationProgressBar(False)
    step = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1))
    x, y = torch.randn(5, 8), torch.randint(4, (5,))
    step(x, y)
    entered = entered_by(lambda: step(x, y))
    assert len(entered) <= 36, sorted(entered)
    assert sum(entered.values()) <= 120, entered
    assert not {"poptorch/core_errors.py", "poptorch/executor/anchors.py"} & entered.keys()
