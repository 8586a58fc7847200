"""Check what `inspect` and `explain` show of executors of poptorch."""

import pytest
import torch
from torch import nn

import ipu_dynamo
import poptorch
from ipu_dynamo import explain, inspect
from tests.inspection.looking import check_members, nothing_changes

X, Y = torch.arange(128.0).reshape(16, 8) / 128, torch.arange(16) % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(8, 8), ipu_id=0)
        self.second = poptorch.BeginBlock(nn.Linear(8, 4), ipu_id=1)

    def forward(self, x, y):
        out = self.second(torch.relu(self.first(x)))
        return out, nn.functional.cross_entropy(out, y)


def executor():
    options = poptorch.Options().showCompilationProgressBar(False)
    options.Training.gradientAccumulation(4)
    model = Net()
    return poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture(autouse=True)
def eager(request, monkeypatch):
    if request.node.get_closest_marker("inductor") is None:
        monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_explain_trains_nothing_before_and_after_a_call(engine, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", engine)
    training = executor()
    before = [p.clone() for p in training.model.parameters()]
    count = len(ipu_dynamo.programs())
    lowered = explain(training, X, Y)
    assert not training.isCompiled()
    assert len(ipu_dynamo.programs()) == count
    assert "Net: 2 stages on 2 IPUs, 4 micro-batches" in str(lowered)
    training(X, Y)
    trained = [p.clone() for p in training.model.parameters()]
    assert not all(map(torch.equal, before, trained))
    assert str(explain(training, X, Y)) == str(inspect(training))
    assert all(map(torch.equal, training.model.parameters(), trained))
    assert inspect(training).program.text == lowered.program.text


def test_members(monkeypatch):
    training = executor()
    assert "not compiled yet; call it, or `explain(x, *inputs)`" in str(check_members(training))
    training(X, Y)
    with nothing_changes(monkeypatch):
        seen = check_members(training)
    assert repr(seen) == "<training executor of Net: 2 stages on 2 IPUs, 4 micro-batches>"
    assert [row.layers for row in seen.cut.rows] == [("first",), ("second",)]
    inference = poptorch.inferenceModel(Net())
    assert repr(inspect(inference)).startswith("<inference executor of Net: not compiled yet")


def test_a_module_that_is_trained_shows_its_executor():
    training = executor()
    assert str(inspect(training.model)) == str(inspect(training))
    training(X, Y)
    assert "2 stages on 2 IPUs" in str(inspect(training.model))
    assert str(inspect(training.model)) == str(inspect(training))
    model = training.model
    training.destroy()
    assert "not compiled yet" in str(inspect(model))
