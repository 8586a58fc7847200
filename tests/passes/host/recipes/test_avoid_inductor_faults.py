"""Check that what Inductor gets wrong runs operator by operator, and nothing else does."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import ipu_dynamo
from ipu_dynamo import Options
from ipu_dynamo.passes.host.recipes.avoid_inductor_faults import miscompiled


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


@pytest.mark.few(2)
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


def reciprocal_of_sum(x):
    return 1 / (x.ceil() + torch.zeros_like(x))


def product_of_pads(x):
    v = F.gelu(x)
    a = F.pad(v.permute(3, 2, 1, 0), (0, 0, 0, 12), value=0.5)
    return torch.matmul(F.pad(v, (0, 0, 0, 0, 0, 12), value=0.5), a)


HALF, BYTES = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.uint8)
IMAGE = torch.ones(1, 8, 20, 20).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("compute", "x", "fault"),
    [
        (lambda x: x.argmin(), BYTES, "argmin"),
        (lambda x: x.amax(0), BYTES.to(torch.int8), "amax"),
        (lambda x: x.amax(0), BYTES.short(), None),
        (lambda x: x.remainder(3.14), HALF, "remainder"),
        (lambda x: x.fmod(1.7), HALF.bfloat16(), "fmod"),
        (lambda x: x.fmod(1.5), HALF, None),
        (lambda x: x.remainder(3.14), HALF.float(), "remainder"),
        (lambda x: x.remainder(3), BYTES, None),
        (lambda x: x // 0.1, HALF.float(), "floor_divide"),
        (lambda x: x.div(0.1, rounding_mode="floor"), HALF.float(), "div"),
        (lambda x: x.div(0.1, rounding_mode="trunc"), HALF.float(), None),
        (lambda x: x // 2, BYTES, None),
        (lambda x: x.erfinv(), HALF.float(), "erfinv"),
        (lambda x: x.sinh(), HALF.float(), "sinh"),
        (lambda x: x * 0, HALF.float(), "mul"),
        (lambda x: x * 0, BYTES, None),
        (lambda x: torch.addmm(x, x[None], x.outer(x), beta=0), HALF.float(), "addmm"),
        (lambda x: 1 / torch.minimum(x, -x), HALF.float(), "minimum"),
        (lambda x: 1 / F.elu(x), HALF.float(), "elu"),
        (lambda x: F.elu(x) * 2, HALF.float(), None),
        (reciprocal_of_sum, HALF.float(), "add"),
        (lambda x: x + torch.zeros_like(x), HALF.float(), None),
        (product_of_pads, IMAGE, "constant_pad_nd_1"),
        (lambda x: F.pad(x, (1, 1)) + F.pad(x, (2, 0)), IMAGE, None),
    ],
)
def test_faults_that_only_some_values_show_are_avoided(compute, x, fault):
    graph = make_fx(compute, tracing_mode="fake")(x).graph
    node = miscompiled(graph)
    assert (node and node.name) == fault
