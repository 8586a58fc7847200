"""Check that norms on halves keep what a rounded mean would lose; norms on float32 lose nothing."""

import pytest
import torch
from torch import nn

from ipu_dynamo import Options, compile_training
from ipu_dynamo.passes.level_text import write_level
from tests.properties.evaluate import captured, check, evaluate, lines_of, named_inputs

MEAN = 1000.0  # halves near it are 0.5 apart


class Normalised(nn.Module):
    """A norm whose output has gradients that differ from element to element."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.shift = norm, nn.Parameter(torch.zeros((), dtype=norm.weight.dtype))

    def forward(self, x):
        y = self.norm(x + self.shift)
        return y, (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def norms():
    return [
        (nn.BatchNorm1d(6), (32, 6)),
        (nn.BatchNorm2d(6), (4, 6, 5, 5)),
        (nn.InstanceNorm1d(6, affine=True), (4, 6, 40)),
        (nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (4, 6, 40)),
        (nn.GroupNorm(2, 6), (4, 6, 5, 5)),
        (nn.LayerNorm(64), (4, 64)),
    ]


def error(norm, shape, dtype, *, stable_norm, mean):
    """The largest error of results, and of the gradient of the norm's weight, beside float64."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) + mean).to(dtype)
    exact, model = Normalised(norm.double()), None
    y, loss = exact(x.double())
    loss.backward()
    wanted = exact.norm.weight.grad
    model = Normalised(norm.to(dtype))
    before = model.norm.weight.detach().clone()
    options = Options(engine="eager", output_mode="all", stable_norm=stable_norm)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=1.0), options, loss=1)
    found, _ = step(x)
    gradient = before - model.norm.weight.detach()
    return (
        (found.double() - y).abs().max().item(),
        ((gradient.double() - wanted).abs().max() / wanted.abs().max()).item(),
    )


@pytest.mark.parametrize("case", range(len(norms())), ids=lambda i: repr(norms()[i][0]))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_statistics_of_all_norms_are_taken_mean_first(case, dtype):
    norm, shape = norms()[case]
    mean = MEAN if dtype == torch.float16 else 3e4  # whose square has no fractions in float32
    result, gradient = error(norm, shape, dtype, stable_norm=True, mean=mean)
    assert result < 0.01
    assert gradient < 0.02 or dtype == torch.float32  # where it is a difference of large sums


def test_without_it_the_mean_of_halves_is_a_half():
    """On the eager engine, as in PyTorch: otherwise nobody would need the option."""
    result, _ = error(*norms()[0], torch.float16, stable_norm=False, mean=MEAN)
    assert result > 0.05
    _, gradient = error(*norms()[4], torch.float16, stable_norm=False, mean=MEAN)
    assert gradient > 0.05


def test_keeps_values_and_metadata():
    model, data = Normalised(nn.GroupNorm(2, 6).half()), (torch.randn(8, 6).half(),)
    model.forward = _loss_only(model.forward)
    options = Options(stable_norm=True)
    capture, one = captured(model, data, options, before="UpcastNorms")
    inputs = named_inputs(model, data)
    before, lines = evaluate(capture, inputs), lines_of(capture.graph.graph.nodes)
    assert one(capture)
    check(capture)
    after = evaluate(capture, inputs)
    assert after.keys() == before.keys()
    torch.testing.assert_close(after, before, rtol=5e-3, atol=5e-3)  # where halves are rounded
    assert lines_of(capture.graph.graph.nodes) <= lines
    text = write_level(capture)
    assert not one(capture)
    assert write_level(capture) == text


def _loss_only(forward):
    def marked(x):
        from ipu_dynamo import identity_loss

        return identity_loss(forward(x)[1], "sum")

    return marked
