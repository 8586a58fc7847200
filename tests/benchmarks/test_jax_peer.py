"""Check that JAX is compared before it is timed, and what is there without it."""

import pytest
import torch

from benchmarks import jax_peer, models
from benchmarks.jax_peer import compare, inferred, trained, with_installed
from benchmarks.measure import WrongValuesError
from benchmarks.work import Training


def test_without_jax_there_is_no_such_contender(monkeypatch):
    contenders = {"eager": list, "JAX": set, "ours": dict}
    monkeypatch.setattr(jax_peer, "is_installed", lambda: False)
    assert with_installed(contenders) == {"eager": list, "ours": dict}
    monkeypatch.setattr(jax_peer, "is_installed", lambda: True)
    assert with_installed(contenders) == contenders


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
    inputs = torch.randn(24, 6), torch.randint(3, (24,))
    work = Training(models.perceptron(6, 8, 3), optimizer, inputs, rows=4, accumulation=2)
    step = trained(work)
    step()
    step.check()


TOKENS = torch.arange(12).view(2, 6) % 7
IMAGES = torch.linspace(-1, 1, 2 * 28 * 28).view(2, 1, 28, 28)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (models.mnist, (IMAGES, TOKENS[0, :2])),
        (models.small_images, (IMAGES[..., :8, :8], TOKENS[0, :2])),
        (lambda: models.encoder(2, 16), (IMAGES[:, 0, :6, :16], IMAGES[:, 0, 6:12, :16])),
        (lambda: models.tied_language_model(2, 7, 16, 6), (TOKENS, TOKENS.roll(-1, 1))),
        (lambda: models.plain_language_model(1, 7, 16), (TOKENS, TOKENS.roll(-1, 1))),
    ],
)
def test_every_model_is_plain_pytorchs(make, inputs):
    pytest.importorskip("jax")
    torch.manual_seed(0)
    step = trained(Training(make(), _sgd, inputs, rows=1))
    step()
    step.check()


def test_recurrent_layers_are_plain_pytorchs():
    pytest.importorskip("jax")
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 4, 8).unbind()
    step = trained(Training(models.recurrent("LSTM", 2, 8), _sgd, inputs, rows=2, axis=1))
    step()
    step.check()


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (models.normed_encoder(1, 16), torch.randn(2, 3, 16)),
        (models.Repeated(8, 5), torch.randn(2, 8)),
    ],
)
def test_inferences_are_plain_pytorchs(model, x):
    pytest.importorskip("jax")
    step = inferred(model, x)
    step()
    step.check()


def test_a_wrong_model_is_noticed(monkeypatch):
    pytest.importorskip("jax")
    torch.manual_seed(0)
    monkeypatch.setitem(jax_peer._LOSSES, models.cross_entropy, lambda x, y: (x**2).mean())
    inputs = torch.randn(4, 6), torch.arange(4) % 3
    step = trained(Training(models.perceptron(6, 8, 3), _sgd, inputs, rows=4))
    step()
    with pytest.raises(WrongValuesError):
        step.check()
