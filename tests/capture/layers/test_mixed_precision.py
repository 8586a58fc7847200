"""Check layers whose weights have another precision than their input."""

import copy

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.testing import assert_close

LAYERS = {
    "linear": (lambda: nn.Linear(6, 3), (4, 6)),
    "no bias": (lambda: nn.Linear(6, 3, bias=False), (4, 6)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, padding="same"), (2, 2, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2), (2, 2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 1, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2), (2, 2, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 6)),
    "batch norm": (lambda: nn.BatchNorm1d(6), (4, 6)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 6)),
}


class WithLoss(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return y, poptorch.identity_loss(y.float() ** 2, "sum")


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """The engine is not the point."""
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


@pytest.mark.parametrize("case", LAYERS)
def test_half_inputs_and_float_weights_give_halves_and_train_float_weights(case):
    make, shape = LAYERS[case]
    torch.manual_seed(0)
    model, x = WithLoss(make()), torch.randn(shape).half()
    plain = WithLoss(make())
    plain.load_state_dict(model.state_dict())
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    rounded = {name: p.half().float() for name, p in plain.named_parameters()}
    expected, loss = torch.func.functional_call(plain, rounded, (x.float(),))
    loss.backward()
    step = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=0.01))
    found, _ = step(x)
    assert found.dtype == torch.float16
    assert_close(found.float(), expected.detach(), rtol=4e-3)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        update = (before[name] - parameter.detach()) / 0.01
        difference = (update - gradients[name]).abs().max()
        assert difference <= 1e-2 * gradients[name].abs().max() + 1e-2


@pytest.mark.parametrize("case", LAYERS)
def test_float_inputs_and_half_weights_give_floats(case):
    make, shape = LAYERS[case]
    torch.manual_seed(0)
    layer = make().half().eval()
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            layer.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = (
                buffer.float()
            )
    x = torch.randn(shape)
    expected = make().eval()
    expected.load_state_dict({name: t.float() for name, t in layer.state_dict().items()})
    found = poptorch.inferenceModel(layer)(x)
    assert found.dtype == torch.float32
    assert_close(found, expected(x).detach())


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_running_statistics_stay_in_float(engine, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", engine)
    model = WithLoss(nn.BatchNorm1d(3))
    step = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=0.01))
    step(torch.randn(4, 3).half())
    step.copyWeightsToHost()
    assert model.layer.running_mean.dtype == torch.float32
    assert model.layer.running_mean.abs().max() > 0


class Normalised(nn.Module):
    """A normalisation with a loss. Buffers and weights get types of their own."""

    def __init__(self, layer, weights, statistics):
        super().__init__()
        self.layer = layer.to(weights)
        for name in ("running_mean", "running_var"):
            setattr(layer, name, getattr(layer, name).to(statistics))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = self.layer(x)
        return y, poptorch.identity_loss((y.float() * self.scale).square().mean(), "none")


NORMS = {
    "batch": lambda: nn.BatchNorm1d(3, momentum=0.5),
    "instance": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True, momentum=0.5),
}
TYPES = (torch.float16, torch.float32)


@pytest.mark.few(12)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("statistics", TYPES)
@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("given", TYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_normalisations_take_every_mix_of_types(norm, given, weights, statistics, training):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5).to(given)
    model = Normalised(NORMS[norm](), weights, statistics).train(training)
    with torch.no_grad():
        model.layer.weight += 0.25
        model.layer.running_mean += 0.5
    plain = copy.deepcopy(model.layer).float()
    expected = plain(x.float()).detach()
    if training:
        step = poptorch.trainingModel(model, None, torch.optim.SGD([model.scale], lr=0.1))
    else:
        step = poptorch.inferenceModel(model)
    found, _ = step(x)
    assert found.dtype == given
    assert_close(found.float(), expected, rtol=4e-3)
    if training:
        step.copyWeightsToHost()
    for name in ("running_mean", "running_var"):
        statistic = getattr(model.layer, name)
        assert statistic.dtype == statistics
        assert_close(statistic.float(), getattr(plain, name), rtol=2e-3)
