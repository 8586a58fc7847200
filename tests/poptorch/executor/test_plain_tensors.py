"""Check what becomes of tensors of a model that are neither parameters nor buffers."""

import pytest
import torch
from torch import nn

import poptorch

pytestmark = pytest.mark.filterwarnings("ignore:the tensor .* is neither an input")


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = torch.tensor([0.0])
        self.rows = [torch.ones(2)]

    def forward(self):
        self.i += 1
        return self.i


class Part(nn.Module):
    """Change plain tensors by a view, by each other, by inputs and by random numbers."""

    def __init__(self):
        super().__init__()
        self.counts = torch.zeros(3)
        self.total = torch.zeros(())
        self.seen = torch.zeros(())
        self.drawn = torch.zeros(())
        self.kept = torch.arange(3)

    def forward(self, x):
        self.counts[1] += 2
        row = self.counts.view(3, 1)
        row.mul_(2)
        self.total += self.counts.sum() + torch.ones(2).sum()
        self.seen += x.sum()
        self.drawn += torch.rand(())
        return x + self.total + self.kept


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.part(x)


def test_a_change_happens_on_the_host_when_compiling_and_not_again():
    model = Counter()
    executor = poptorch.inferenceModel(model)
    counted = model.i
    assert [float(executor()) for _ in range(3)] == [1, 1, 1]
    assert model.i is counted
    assert float(model.i) == 1


def test_compiling_again_goes_on_from_there():
    model = Counter()
    executor = poptorch.inferenceModel(model)
    executor()
    executor.destroy()
    assert float(executor()) == 2
    assert float(model.i) == 2


def test_changes_through_views_and_by_each_other_are_those_of_pytorch():
    model, plain = Nested(), Nested()
    x = torch.ones(2, 3)
    out = poptorch.inferenceModel(model)(x)
    assert torch.equal(out, plain(x))
    for name in ("counts", "total", "kept"):
        assert torch.equal(getattr(model.part, name), getattr(plain.part, name)), name


def test_what_depends_on_inputs_or_random_numbers_stays_on_the_host():
    model = Nested()
    poptorch.inferenceModel(model)(torch.ones(2, 3))
    assert float(model.part.seen) == float(model.part.drawn) == 0


def test_a_compilation_that_fails_changes_nothing():
    class Fails(Counter):
        def forward(self, x):
            self.i += 1
            return x if x.sum() > 0 else -x

    model = Fails()
    with pytest.raises(poptorch.Error):
        poptorch.inferenceModel(model)(torch.ones(2))
    assert float(model.i) == 0
