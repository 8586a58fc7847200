"""Check `poptorch.CPU`."""

import pytest
import torch
from torch import nn

import poptorch


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.cpu = poptorch.CPU(self.layer, "layer on the host")
        self.running = []

    def forward(self, x):
        self.running.append(poptorch.isRunningOnIpu())
        return self.cpu(x * 2) + 1


def test_a_layer_runs_on_the_host_and_needs_no_gradient():
    model, x = Model(), torch.randn(6, 3)
    options = poptorch.Options().deviceIterations(3)
    result = poptorch.inferenceModel(model, options)(x)
    assert torch.allclose(result, model(x))
    assert not model.layer.weight.requires_grad
    assert model.running == [True, False]


def test_the_host_is_no_ipu_while_the_program_runs():
    seen = []

    def function(x):
        seen.append(poptorch.isRunningOnIpu())
        return x

    cpu = poptorch.CPU(function, "asks")
    poptorch.inferenceModel(lambda x: cpu(x))(torch.ones(2))
    assert seen == [True, False]


def test_training_is_refused():
    model = Model()
    model.own = nn.Linear(3, 3)
    training = poptorch.trainingModel(model, None, torch.optim.SGD(model.own.parameters(), lr=1.0))
    with pytest.raises(poptorch.Error, match=r"poptorch\.CPU is only supported in inference"):
        training(torch.randn(2, 3))


def test_outside_of_models_it_is_the_function():
    cpu = poptorch.CPU(lambda x, y: (x + y, x - y), "both")
    assert cpu(3, 1, ignored=5) == (4, 2)
    cpu.execute()
    assert cpu.outputs == (4, 2)


def test_it_reads_weights_that_another_executor_trains():
    model = nn.Linear(2, 2)
    cpu = poptorch.CPU(lambda x: nn.functional.linear(x, model.weight.detach()), "weight")

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            y = self.inner(x)
            if self.training:
                return poptorch.identity_loss(y, "sum")
            return y - self.inner.bias - cpu(x)

    both = Both()
    training = poptorch.trainingModel(both, None, torch.optim.SGD(both.parameters(), lr=0.5))
    x = torch.randn(4, 2)
    training(x)
    both.eval()
    options = poptorch.Options().deviceIterations(2)
    found = poptorch.inferenceModel(both, options)(x)
    assert torch.allclose(found, torch.zeros(4, 2), atol=1e-6)
