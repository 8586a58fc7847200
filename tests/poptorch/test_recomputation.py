"""Check `poptorch.recomputationCheckpoint` and `autoRecomputation` from PopTorch programs."""

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.program import RECOMPUTED


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = poptorch.BeginBlock(nn.Linear(4, 4), ipu_id=1)

    def forward(self, x):
        h = poptorch.recomputationCheckpoint(torch.tanh(self.first(x)))
        return poptorch.identity_loss(self.second(torch.sin(h) * h), "sum")


def compiled(setting=None):
    """The core of an executor."""
    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    if setting is not None:
        options._Popart.set("autoRecomputation", setting)
    executor = poptorch.trainingModel(Model(), options)
    executor.compile(torch.ones(6, 4))
    return executor._core


def repeated_in(program):
    """How many operators a program repeats."""
    return sum(bool(n.meta.get(RECOMPUTED)) for f in program.functions for n in f.operators)


def repeated(setting=None):
    """How many operators the program repeats."""
    return repeated_in(compiled(setting).program)


def test_a_pipeline_recomputes_unless_told_otherwise():
    assert repeated() == repeated(3) > 0
    assert repeated(0) == 0


def test_numbers_are_those_of_popart():
    assert repeated(1) == repeated(4) > 0
    assert repeated(2) == repeated()
    with pytest.raises(poptorch.Error, match="Value for RecomputationType out of range"):
        repeated(5)


@pytest.mark.parametrize("setting", [None, 1, 3])
def test_this_computer_keeps_what_an_ipu_computes_again(setting):
    core = compiled(setting)
    assert core.program.recomputed == "default"
    assert repeated_in(core.executable.host_program.inlined) == 0 < repeated_in(core.program)


def test_gives_back_what_it_was_given():
    a, b = torch.ones(1), torch.ones(2)
    assert poptorch.recomputationCheckpoint(a) is a
    assert poptorch.recomputationCheckpoint(a, b) == (a, b)
    assert poptorch.recomputationCheckpoint([a, b]) == [a, b]
    assert poptorch.recomputationCheckpoint((a,)) == (a,)


@pytest.mark.parametrize("wrong", [(1,), (torch.ones(1), "x"), ([torch.ones(1), None],)])
def test_refuses_what_is_no_tensor(wrong):
    with pytest.raises(ValueError, match="All inputs must be tensors"):
        poptorch.recomputationCheckpoint(*wrong)
