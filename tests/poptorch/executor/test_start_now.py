"""Check that executors run steps before their functions are compiled, if the variable says so."""

import threading

import torch
from torch import nn

import poptorch
from ipu_dynamo.options.options import START
from tests.whole_step import start_now
from tests.whole_step.start_now import HeldEngine


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)

    def forward(self, x, y):
        out = self.fc(x)
        return out, poptorch.identity_loss(nn.functional.mse_loss(out, y), "none")


def executor(monkeypatch):
    engine = start_now.use(monkeypatch, HeldEngine())
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, optimizer=optimizer), engine, model


def test_the_variable_lets_the_first_step_run_now(monkeypatch):
    monkeypatch.setenv(START, "now")
    training, engine, model = executor(monkeypatch)
    data = torch.randn(8, 4), torch.randn(8, 3)
    training(*data)
    assert engine.compiled == 0
    first = model.fc.weight.detach().clone()
    engine.let_go.set()
    training.optimizer = poptorch.optim.Adam(model.parameters(), lr=0.2)
    training(*data)
    assert engine.compiled == 1
    assert not torch.equal(model.fc.weight, first)
    monkeypatch.delenv(START)
    alone, _, other = executor(monkeypatch)
    alone(*data)
    torch.testing.assert_close(other.fc.weight.detach(), first)


def test_compile_waits(monkeypatch):
    monkeypatch.setenv(START, "now")
    training, engine, _ = executor(monkeypatch)
    timer = threading.Timer(0.2, engine.let_go.set)
    timer.start()
    training.compile(torch.randn(8, 4), torch.randn(8, 3))
    timer.join()
    assert engine.compiled == 1
