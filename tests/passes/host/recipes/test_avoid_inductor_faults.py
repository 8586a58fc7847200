"""Check that what Inductor gets wrong runs operator by operator, and nothing else does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from ipu_dynamo import Options


class Pooled(nn.Module):
    """A trainable tensor, its average pool, and a loss that weighs every window otherwise."""

    def __init__(self, pool, shape):
        super().__init__()
        torch.manual_seed(0)
        self.pool, self.weight = pool, nn.Parameter(torch.rand(shape))

    def forward(self, x):
        y = self.pool(x * self.weight)
        return ipu_dynamo.identity_loss(y * torch.linspace(1, 2, y.numel()).view_as(y), "sum")


def trained(pool, x):
    """Weights after a step, and its host program."""
    model = Pooled(pool, x.shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = ipu_dynamo.compile_training(model, optimizer, Options(engine="inductor"))
    step(x)
    return model.weight.detach().clone(), str(step.executable.host_program)


def plain(pool, x):
    model = Pooled(pool, x.shape)
    model(x).backward()
    return (model.weight - model.weight.grad).detach()


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("pool", "shape", "avoided"),
    [
        (lambda x: F.avg_pool1d(x, 7, 3, ceil_mode=True), (1, 2, 9), True),
        (lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True), (1, 1, 5, 6), True),
        (lambda x: F.avg_pool3d(x, (4, 5, 6), (2, 3, 2), 2, ceil_mode=True), (1, 1, 6, 5, 6), True),
        (lambda x: F.avg_pool2d(x, 2, ceil_mode=True), (1, 1, 8, 8), False),  # windows fit
        (
            lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
            (1, 1, 6, 7),
            False,
        ),
    ],
)
def test_average_pools_train_as_plain_pytorch(pool, shape, avoided):
    torch.manual_seed(1)
    x = torch.randn(shape)
    weight, text = trained(pool, x)
    torch.testing.assert_close(weight, plain(pool, x))
    assert ("gets %avg_pool" in text) == avoided
