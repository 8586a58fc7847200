"""Check batch norms with `momentum=None`, which average over all batches."""

import copy

import pytest
import torch
from torch import nn

import ipu_dynamo
import poptorch
from ipu_dynamo import Block, Options, Strategy, compile_inference, compile_training

KINDS = {
    "1d": (lambda: nn.BatchNorm1d(4, momentum=None), (3, 4)),
    "2d": (lambda: nn.BatchNorm2d(4, momentum=None, affine=False), (3, 4, 2, 2)),
    "3d": (lambda: nn.BatchNorm3d(4, momentum=None, eps=0.1), (3, 4, 2, 2, 2)),
    "lazy": (lambda: nn.LazyBatchNorm1d(momentum=None), (3, 4)),
    "double": (lambda: nn.BatchNorm1d(4, momentum=None).double(), (3, 4)),
}


class Normalised(nn.Module):
    """A norm twice, with a trained scale before it."""

    def __init__(self, norm):
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(())), norm

    def forward(self, x):
        with Block("scale", 0):
            h = x * self.scale
        with Block("norm", 1):
            y = self.norm(self.norm(h) + h)
            return ipu_dynamo.identity_loss(y.tanh().sum(), "none")


def batches(shape, count, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=rng) * n + n).to(dtype) for n in range(1, count + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_averages_over_all_batches(kind):
    make, shape = KINDS[kind]
    norm = make()
    norm(torch.ones(shape, dtype=torch.float64 if kind == "double" else torch.float32))
    model = Normalised(norm)
    plain = copy.deepcopy(model)
    options = Options(engine="eager", gradient_accumulation=2, strategy=Strategy("sharded"))
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    dtype = next(iter(norm.buffers())).dtype
    for pair in zip(*[iter(batches(shape, 6, dtype))] * 2, strict=True):
        step(torch.cat(pair))
        optimizer.zero_grad()
        for x in pair:
            (plain(x) / 2).backward()
        optimizer.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert model.norm.num_batches_tracked == 1 + 2 * 6


def test_what_is_averaged_normalises_in_evaluation():
    norm = nn.BatchNorm1d(4, momentum=None)
    train = compile_inference(norm, Options(engine="eager"))
    for x in batches((3, 4), 3):
        train(x)
    train.read_weights()
    evaluate = compile_inference(copy.deepcopy(norm).eval(), Options(engine="eager"))
    plain = nn.BatchNorm1d(4, momentum=None)
    for x in batches((3, 4), 3):
        plain(x)
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())
    torch.testing.assert_close(evaluate(x), plain.eval()(x).detach())


def test_poptorch_which_has_no_count_refuses():
    model = poptorch.inferenceModel(nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(poptorch.Error, match="number of batches is a constant"):
        model(torch.randn(3, 4))
