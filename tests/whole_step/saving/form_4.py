"""Models whose programs are saved in form 4 in `form_4/`, with the losses that these went on to.

The folder was written by this file, run with the version of commit c2b52fd, which has form 4:

    git worktree add --detach OLD c2b52fd
    cp tests/whole_step/saving/form_4.py OLD && cd OLD && PYTHONPATH=. python form_4.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ipu_dynamo
import poptorch
from ipu_dynamo import Block, ClipGradNorm, compile_training

FOLDER = Path(__file__).with_name("form_4")
CALLS = 2  # before saving, and after


class TwoStages(nn.Module):
    """Copies of the clipping's numbers and of the loss scale; a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, y):
        with Block("first", ipu_id=0):
            h = torch.tanh(self.first(x)) + 0.01 * self.calls
            self.calls.add_(1)
        with Block("second", ipu_id=1):
            return F.cross_entropy(self.second(h), y)


class Drawing(nn.Module):
    """A random key, and an update that is traced, with numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, y):
        h = F.dropout(torch.tanh(self.first(x)), 0.5)
        return F.cross_entropy(self.second(h), y)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def nadam(model):
    return torch.optim.NAdam(model.parameters(), lr=0.01)


CASES = {
    "two_stages": (
        TwoStages,
        sgd,
        {"gradient_accumulation": 2, "loss_scale": 4.0, "loss_scale_is_variable": True},
        {"clip": ClipGradNorm(0.05)},
    ),
    "drawing": (Drawing, nadam, {"seed": 7}, {}),
}


def executor():
    """An executor of PopTorch, untrained."""
    torch.manual_seed(0)
    model, options = Drawing(), poptorch.Options().randomSeed(3)
    options.showCompilationProgressBar(False)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    return poptorch.trainingModel(model, options, optimizer)


def batch(call):
    """The rows of a call, and their classes."""
    return torch.arange(12.0).view(4, 3).add(call).sin(), (torch.arange(4) + call) % 2


def begin(name):
    """Model, optimiser and step of a case, untrained."""
    torch.manual_seed(0)
    model, optimizer, options, more = CASES[name]
    model = model()
    optimizer = optimizer(model)
    step = compile_training(model, optimizer, {"engine": "eager", **options}, loss=0, **more)
    return model, optimizer, step


def losses(step, first):
    """What the calls from a number on return."""
    return [step(*batch(first + i)).mean().item() for i in range(CALLS)]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in CASES:
        _, _, step = begin(name)
        losses(step, 0)
        ipu_dynamo.save(step, folder / f"{name}.saved")
        found[name] = losses(step, CALLS)
    run = executor()
    run.compile(*batch(0))
    run.save(str(folder / "executor.saved"), export_model=False)
    found["executor"] = losses(run, 0)
    (folder / "losses.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
