"""Check that executors on the same tensors see what one of them has learnt."""

import pytest
import torch
from torch import nn

import poptorch
from tests.poptorch.executor.models import Weighted

ONE = torch.ones(1)


class Around(nn.Module):
    """A model around another, which has all its tensors."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Scaled(nn.Module):
    """A model whose only tensor, a buffer, grows at every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        self.scale.add_(1.0)
        return x * self.scale


class WithScaled(nn.Module):
    """A trained model around `Scaled`."""

    def __init__(self):
        super().__init__()
        self.inner, self.w = Scaled(), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return poptorch.identity_loss(self.inner(x) * self.w, "sum")


def trainer(model):
    return poptorch.trainingModel(model, None, poptorch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("compiled_first", [False, True])
def test_a_part_of_a_trained_model_has_its_weights(compiled_first):
    model = Weighted()
    training = trainer(Around(model))
    follower = poptorch.inferenceModel(model)
    if compiled_first:
        assert follower(ONE) == 1
    for expected in (0, -1):
        training(ONE)
        assert follower(ONE) == expected


def test_a_model_around_a_trained_one_has_its_weights():
    model = Weighted()
    training, follower = trainer(model), poptorch.inferenceModel(Around(model))
    for expected in (0, -1):
        training(ONE)
        assert follower(ONE) == expected


def test_a_part_with_buffers_only_has_them():
    model = WithScaled()
    training, part = trainer(model), poptorch.inferenceModel(model.inner)
    training(ONE)
    assert part(ONE) == 3  # trained once, and its own step
    training(ONE)
    assert part(ONE) == 4


@pytest.mark.parametrize("compiled", [False, True])
def test_training_that_begins_later_is_followed(compiled):
    model = Weighted()
    follower = poptorch.inferenceModel(model)
    if compiled:
        assert follower(ONE) == 1
    training = trainer(model)
    training(ONE)
    assert follower(ONE) == 0


def test_a_second_training_starts_from_what_the_first_has_learnt():
    model = Weighted()
    trainer_of_all = trainer(Around(model))
    trainer_of_all(ONE)
    assert trainer(model)(ONE) == 0  # the output before its own update


def test_what_is_not_in_training_keeps_its_device_weights():
    model, other = Weighted(), Weighted()
    training, executor = trainer(other), poptorch.inferenceModel(model)
    assert executor(ONE) == 1
    with torch.no_grad():
        model.w.fill_(5)
    training(ONE)
    assert executor(ONE) == 1
