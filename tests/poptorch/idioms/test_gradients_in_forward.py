"""Train models that take gradients in `forward`: penalties, adversarial inputs, inner steps."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch

ROWS, ACCUMULATION, STEPS = 3, 2, 3


class Penalty(nn.Module):
    """A critic whose gradient with respect to its input is to have the norm 1."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, y):
        x = x.detach().requires_grad_(True)
        scores = self.second(torch.tanh(self.first(x)))
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        loss = scores.mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
        return poptorch.identity_loss(loss, "none")


class Adversarial(nn.Module):
    """A classifier of inputs that were moved to where its loss is larger."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, y):
        near = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(self.layer(near), y), near)
        return F.cross_entropy(self.layer(x + 0.1 * slope.sign().detach()), y)


class InnerStep(nn.Module):
    """A classifier that is judged after one step of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, y):
        weight, bias = self.layer.weight, self.layer.bias
        loss = F.cross_entropy(F.linear(x, weight, bias), y)
        slopes = torch.autograd.grad(loss, (weight, bias), create_graph=True)
        stepped = [p - 0.5 * slope for p, slope in zip((weight, bias), slopes, strict=True)]
        return F.cross_entropy(F.linear(x.flip(0), *stepped), y.flip(0))


class Changed(nn.Module):
    """A classifier with a hook on a value, as layers that reverse gradients have."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, y):
        hidden = torch.relu(self.first(x))
        hidden.register_hook(lambda gradient: -0.5 * gradient)
        return F.cross_entropy(self.second(hidden), y)


@pytest.mark.parametrize("kind", [Penalty, Adversarial, InnerStep, Changed])
def test_weights_and_losses_are_those_of_a_plain_loop(kind):
    torch.manual_seed(0)
    expected = kind()
    model = copy.deepcopy(expected)
    options = poptorch.Options()
    options.Training.gradientAccumulation(ACCUMULATION)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=0.05)
    )
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05)
    rows = ROWS * ACCUMULATION
    for _ in range(STEPS):
        batch = torch.randn(rows, 4), torch.randint(3, (rows,))
        optimizer.zero_grad()
        for part in zip(*(x.chunk(ACCUMULATION) for x in batch), strict=True):
            loss = expected(*part)
            (loss / ACCUMULATION).backward()
        optimizer.step()
        torch.testing.assert_close(training(*batch), loss.detach(), rtol=1e-4, atol=1e-5)
    training.copyWeightsToHost()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
