"""Check that JAX is compared before it is timed, and what is there without it."""

import pytest
import torch
from torch import nn

from benchmarks.jax_peer import models, peer
from benchmarks.jax_peer.peer import Training, compare, inferred, trained, with_jax
from benchmarks.measure import WrongValuesError
from benchmarks.recurrent import Model
from benchmarks.training_step import WithLoss


def test_without_jax_there_is_no_such_contender(monkeypatch):
    contenders = {"eager": list, "ours": dict}
    monkeypatch.setattr(peer, "is_installed", lambda: False)
    assert with_jax(contenders, set) == contenders
    monkeypatch.setattr(peer, "is_installed", lambda: True)
    assert list(with_jax(contenders, set)) == ["eager", "JAX", "ours"]


def test_values_that_differ_are_an_error():
    values = torch.tensor([1.0, -4.0])
    compare((values + 3e-4).numpy(), values)
    with pytest.raises(WrongValuesError, match=r"0\.00012"):
        compare((values + 5e-4).numpy(), values)
    with pytest.raises(WrongValuesError, match="nan"):
        compare((values / 0 * 0).numpy(), values)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("optimizer", [_sgd, _adamw])
def test_a_training_is_plain_pytorchs(optimizer):
    pytest.importorskip("jax")
    torch.manual_seed(0)
    model = WithLoss(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs = torch.randn(24, 6), torch.randint(3, (24,))
    work = Training(model, optimizer, models.perceptron, inputs, rows=4, accumulation=2)
    step = trained(work)
    step()
    step.check()


def test_a_wrong_model_is_noticed():
    pytest.importorskip("jax")
    torch.manual_seed(0)
    model = WithLoss(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    work = Training(
        model, _sgd, models.perceptron, (torch.randn(4, 6), torch.arange(4) % 3), rows=4
    )
    step = trained(work)
    step()
    with pytest.raises(WrongValuesError):
        step.check()


def test_recurrent_layers_are_plain_pytorchs():
    pytest.importorskip("jax")
    torch.manual_seed(0)
    model, batch = Model("lstm"), (torch.randn(3, 2, 128), torch.randn(3, 2, 128))

    def loss(weights, x):
        return models.lstm(weights, x, 0.0, layers=2)

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model.layers

        def forward(self, x):
            return self.layers(x)[0].square().mean()

    step = inferred(loss, Norm(), batch[0])
    step()
    step.check()
