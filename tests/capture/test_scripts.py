"""Check models with functions and modules of TorchScript."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from ipu_dynamo import InputError, compile_inference, compile_training

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")
EAGER = {"engine": "eager"}


def activation(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x) * 2
    return y * torch.sigmoid(y)


def inner():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def traced(module):
    return torch.jit.trace(module, torch.randn(2, 4))


class Net(nn.Module):
    def __init__(self, make=lambda module: module, function=activation):
        super().__init__()
        module = inner()
        self.first, self.inner, self.function = nn.Linear(3, 4), make(module), function

    def forward(self, x):
        result = self.function(self.inner(self.first(x)))
        return result, F.mse_loss(result, x)


MAKERS = {
    "function": lambda: Net(function=torch.jit.script(activation)),
    "scripted": lambda: Net(torch.jit.script),
    "traced": lambda: Net(traced),
}


def made(make):
    torch.manual_seed(1)
    return make()


@pytest.mark.few(6)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("door", ["core", "poptorch"])
@pytest.mark.parametrize("kind", MAKERS)
def test_gradients_go_through_scripts(kind, door, warm):
    """TorchScript optimises code after some calls, and has an autograd of its own then."""
    model, expected = made(MAKERS[kind]), made(Net)
    for _ in range(4 if warm else 0):
        model(torch.randn(4, 3))[1].backward()
    model.zero_grad()
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, expected))
    if door == "core":
        step = compile_training(model, optimizer, EAGER)
    else:
        step = poptorch.trainingModel(model, optimizer=optimizer)
    for _ in range(2):
        x = torch.randn(4, 3)
        step(x)
        reference.zero_grad()
        expected(x)[1].backward()
        reference.step()
    if door == "poptorch":
        step.copyWeightsToHost()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_plain_calls_of_scripts_go_on():
    model = made(MAKERS["scripted"])
    x = torch.randn(4, 3)
    before = model(x)[0]
    torch.testing.assert_close(compile_inference(model, EAGER)(x)[0], before)
    model(x)[1].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_changes_of_scripted_modules_are_noticed():
    model = made(lambda: Net(torch.jit.script)).eval()
    run = compile_inference(model, EAGER)
    x = torch.randn(4, 3)
    run(x)
    model.inner.train()
    with pytest.raises(InputError, match="module inner is in train mode"):
        run(x)
    model.eval()
    run(x)
    getattr(model.inner, "0").weight = copy.deepcopy(nn.Parameter(torch.ones(4, 4)))
    with pytest.raises(InputError, match=r"inner\.0\.weight is not the one"):
        run(x)
