"""Check that checkpoints which change buffers that they read train as the same model without."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipu_dynamo import compile_training
from ipu_dynamo.torch_compile.backend import ipu


class Average(nn.Module):
    """Divides by a moving average, which it changes afterwards."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.full((4,), 2.0))

    def forward(self, x):
        result = x / (self.average.clone() + x.sin())
        self.average.mul_(0.5).add_(x.detach().abs().mean(0))
        return result


class ChangedFirst(Average):
    """Reads the average as it is after the change."""

    def forward(self, x):
        self.average.mul_(0.5).add_(x.detach().abs().mean(0))
        return x / (self.average.clone() + x.sin())


PARTS = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "moving average": Average,
    "moving average, changed first": ChangedFirst,
}


class Checkpointed(nn.Module):
    def __init__(self, make, *, checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), make(), nn.Linear(4, 4), make())
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self.body, x, use_reentrant=False).square().sum()
        return self.body(x).square().sum()


def steps(model, call):
    """Losses, gradients and buffers of two steps."""
    torch.manual_seed(1)
    results = []
    for _ in range(2):
        x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
        model.zero_grad()
        loss = call(x)
        loss.backward()
        results += [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
        results += [buffer.clone() for buffer in model.buffers()]
    return results


@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_trains_as_without_checkpoints(make, engine):
    plain = Checkpointed(make, checkpointed=False).double()
    expected = steps(plain, plain)
    model = Checkpointed(make, checkpointed=True).double()
    call = torch.compile(model, backend=ipu, fullgraph=True, options={"engine": engine})
    torch.testing.assert_close(steps(model, call), expected)


def test_a_changed_input_is_kept_too():
    def changed(x, scale):
        y = x * scale.clone()
        scale.add_(1)
        return y

    def model(x, scale):
        return checkpoint(changed, x.sin(), scale, use_reentrant=False).square().sum()

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(((x.sin() * scale) ** 2).sum(), x)
    (found,) = torch.autograd.grad(
        torch.compile(model, backend=ipu, options={"engine": "eager"})(x, after := scale.clone()), x
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(after, scale + 1)


@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_a_whole_step_trains_as_without_checkpoints(make):
    plain, model = (Checkpointed(make, checkpointed=one) for one in (False, True))
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model))
    step = compile_training(model, other, {"engine": "eager"}, loss=0)
    for x in torch.randn(2, 6, 3):
        optimizer.zero_grad()
        loss = plain(x)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), loss.detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
