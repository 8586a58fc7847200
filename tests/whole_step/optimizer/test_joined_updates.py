"""Check that many small parameters are updated by one call, as each by its own."""

import copy

import pytest
import torch
from torch import nn, optim

from ipu_dynamo import TracedUpdate, compile_training, identity_loss
from ipu_dynamo.runtime.update.traced_update import JoinedUpdate
from tests.whole_step.optimizer import written_optimizers as optimizers


class Many(nn.Module):
    """Ten small weights in two layouts and one large weight; gradients hang on the data alone."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        shapes = [(3, 4)] * 10 + [(100, 100)]
        self.weights = nn.ParameterList(torch.randn(s, dtype=dtype) for s in shapes)
        self.weights[3].data = torch.randn(4, 3, dtype=dtype).t()

    def forward(self, x):
        scaled = [w * (x.mean() + i) for i, w in enumerate(self.weights)]
        return identity_loss(torch.stack([s.float().sin().sum() for s in scaled]), "sum")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.Adamax, {"gradient_accumulation": 2}),
        (optimizers.Lion, {"replicas": 2}),
        (optimizers.Centralized, {}),
    ],
)
def test_they_become_what_they_would_alone(kind, options, monkeypatch):
    calls = []
    write = JoinedUpdate.write
    monkeypatch.setattr(JoinedUpdate, "write", lambda self: (calls.append(1), write(self)))
    model = Many()
    theirs = copy.deepcopy(model)
    ours, reference = kind(model.parameters(), lr=0.01), kind(theirs.parameters(), lr=0.01)
    run = compile_training(model, ours, {"engine": "eager", **options})
    for x in torch.randn(4, 4, 1):
        run(x)
        reference.zero_grad()
        parts = x.chunk(2) if options else [x]
        for part in parts:
            (theirs(part) / len(parts)).backward()
        reference.step()
    for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=2e-6)
    for index, state in reference.state_dict()["state"].items():
        for name, value in state.items():
            mine = ours.state_dict()["state"][index][name]
            torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-5)
    joins = kind is not optimizers.Centralized  # which takes a mean of each gradient
    assert len(calls) == (3 if joins else 0)  # not in the first step, which makes the states


def by_the_mean(gradients, weights, states, numbers):
    """Weights by the mean of all gradients and a table: tensors of their shape that they share."""
    small = [name for name, weight in weights.items() if weight.shape == (3, 4)]
    mean = torch.stack([gradients[name] for name in small]).mean(0)
    return {name: weights[name] - (mean + states["table"]) * numbers["lr"] for name in small}, {}


def test_what_takes_a_shared_tensor_is_updated_alone():
    model = Many()
    theirs = copy.deepcopy(model)
    ours, reference = (
        TracedUpdate({"table": torch.arange(12.0).view(3, 4)}, by_the_mean, {"lr": 0.1})
        for _ in range(2)
    )
    reference.use_parameters_of(theirs)
    run = compile_training(model, ours, {"engine": "eager"})
    for x in torch.randn(2, 4, 1):
        run(x)
        reference.zero_grad()
        theirs(x).backward()
        reference.step()
    for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


def test_states_and_gradients_of_small_weights_lie_in_rows_and_are_not_copied(monkeypatch):
    moved = []
    model = nn.ParameterList(torch.randn(3, 4) for _ in range(10))
    module = nn.Module()
    module.weights = model
    module.forward = lambda x: identity_loss(sum((w * x).sin().sum() for w in model), "none")
    run = compile_training(module, optim.Adamax(module.parameters(), lr=0.1), {"engine": "eager"})
    for _ in range(2):  # the first step makes the states
        run(torch.ones(1, 4))
    versions = {name: state._version for name, state in states_of(run).items()}
    cat = torch.cat
    monkeypatch.setattr(
        torch, "cat", lambda *args, **named: (moved.append(args), cat(*args, **named))
    )
    run(torch.ones(1, 4))
    assert len(moved) == 1  # the weights, which are the model's
    assert all(state._version > versions[name] for name, state in states_of(run).items())


def states_of(run):
    """The tensors of the states that have the shape of a weight."""
    states = [v.name for v in run.program.variables if v.kind == "state" and v.type.shape]
    return {name: run.executable.tensor(name) for name in states}
