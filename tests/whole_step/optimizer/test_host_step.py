"""Check programs that end with the gradients, for an optimiser that steps in Python."""

import copy

import pytest
import torch
from torch import nn, optim

from ipu_dynamo import (
    ClipGradNorm,
    SavedProgramError,
    compile_training,
    save,
)
from ipu_dynamo.errors import OptionError, UpdateError
from ipu_dynamo.program import Program
from tests.whole_step.optimizer import written_optimizers as optimizers
from tests.whole_step.optimizer.test_traced_optimizers import PLACES, Layers

EAGER = {"engine": "eager"}


@pytest.mark.parametrize(
    ("kind", "place", "clip"),
    [
        (optimizers.DecidesByGradients, "one", None),
        (optimizers.DrawsInPython, "accumulation", None),
        (optimizers.Coupled, "pipeline", None),
        (optimizers.Lion, "several steps", None),
        (lambda params: optim.SGD(params, 0.1, momentum=0.9), "replicas", 0.1),
        (optim.Adagrad, "off the chip", None),
    ],
)
def test_the_step_is_the_optimizers_own(kind, place, clip):
    ipus, options = PLACES[place]
    steps = options.get("device_iterations", 1)
    model = Layers(ipus=ipus)
    theirs = copy.deepcopy(model)
    ours, reference = kind(model.parameters()), kind(theirs.parameters())
    rates = [optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (ours, reference)]
    limit = None if clip is None else ClipGradNorm(clip)
    run = compile_training(model, ours, EAGER | options, clip=limit, update="host")
    for _ in range(3):
        x = torch.randn(4 * steps, 3)
        run(x)
        for part in x.split(4):
            reference.zero_grad()
            theirs(part).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(theirs.parameters(), clip)
            reference.step()
        for rate in rates:
            rate.step()
    for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
        assert mine.grad is None
    assert str(ours.state_dict()["param_groups"]) == str(reference.state_dict()["param_groups"])
    assert Program.parse(run.program.text()) == run.program
    assert "host()" in str(run.program)


def test_it_is_never_chosen_by_itself_and_never_saved(tmp_path):
    model = Layers()
    optimizer = optim.SGD(model.parameters(), 0.1)
    run = compile_training(model, optimizer, EAGER, update="host")
    run(torch.ones(2, 3))
    with pytest.raises(SavedProgramError, match='has update="host": its update is Python'):
        save(run, tmp_path / "model")
    with pytest.raises(OptionError, match="update is 'python'; choose program or host"):
        compile_training(model, optimizer, EAGER, update="python")


def test_a_step_that_fails_says_so():
    model = Layers()

    class Fails(optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no step today")

    run = compile_training(model, Fails(model.parameters(), 0.1), EAGER, update="host")
    with pytest.raises(UpdateError, match="an update failed") as info:
        run(torch.ones(2, 3))
    assert "no step today" in str(info.value.__cause__)
    assert all(p.grad is None for p in model.parameters())


def test_copies_of_its_states_are_refused():
    model = Layers()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(OptionError, match='an optimiser with update="host" has states of its own'):
        compile_training(model, optimizer, EAGER | {"guard_updates": True}, update="host")
