"""Check the update equations against the reference's, and what `setOptimizer` may change."""

import copy

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import poptorch
from tests.poptorch.executor.models import Weighted

GRADIENTS = [1.0, -2.0, 0.5]
UNIT = st.sampled_from([0.0, 0.25, 0.5])


def trained(optimizer_of, **counts):
    """The weight after a call for each of GRADIENTS."""
    model = Weighted(2.0)
    options = poptorch.Options()
    options.Training.gradientAccumulation(counts.get("accumulation", 1))
    executor = poptorch.trainingModel(model, options, optimizer_of(model.parameters()))
    for gradient in GRADIENTS:
        executor(torch.full((counts.get("accumulation", 1),), gradient))
    return float(model.w)


@given(momentum=UNIT, dampening=UNIT, weight_decay=UNIT, given_momentum=st.booleans())
def test_sgd_dampens_from_the_first_step(momentum, dampening, weight_decay, given_momentum):
    settings = {"lr": 0.5, "dampening": dampening, "weight_decay": weight_decay}
    if given_momentum:
        settings["momentum"] = momentum
    weight, velocity = 2.0, 0.0
    for gradient in GRADIENTS:
        step = gradient + weight_decay * weight
        velocity = settings.get("momentum", 0.0) * velocity + (1 - dampening) * step
        weight -= 0.5 * velocity
    assert trained(lambda p: poptorch.optim.SGD(p, **settings)) == pytest.approx(weight)
    assert trained(lambda p: torch.optim.SGD(p, **settings)) == pytest.approx(weight)
    scaled = trained(lambda p: poptorch.optim.SGD(p, loss_scaling=8.0, **settings), accumulation=2)
    assert scaled == pytest.approx(weight)


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (poptorch.optim.Adam, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.5}),
        (poptorch.optim.AdamW, torch.optim.AdamW, {"lr": 0.1, "betas": (0.5, 0.75)}),
        (poptorch.optim.RMSprop, torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
        (poptorch.optim.RMSprop, torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
    ],
)
def test_others_are_torchs(ours, theirs, settings):
    reference = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = theirs([reference], **settings)
    for gradient in GRADIENTS:
        reference.grad = torch.tensor([gradient])
        optimizer.step()
    for kind in (ours, theirs):
        assert trained(lambda p, k=kind: k(p, **settings)) == pytest.approx(float(reference))


@given(
    alpha=UNIT,
    momentum=UNIT,
    weight_decay=UNIT,
    centered=st.booleans(),
    eps=st.sampled_from((1e-8, 0.25)),
)
def test_rmsprop_of_tensorflow(alpha, momentum, weight_decay, centered, eps):
    weight, square, mean, velocity = 2.0, 1.0, 0.0, 0.0
    for gradient in GRADIENTS:
        step = gradient + weight_decay * weight
        square = alpha * square + (1 - alpha) * step * step
        mean = alpha * mean + (1 - alpha) * step if centered else 0.0
        below = max(square - mean * mean, 0.0) + eps
        velocity = momentum * velocity + 0.5 * step / below**0.5
        weight -= velocity
    assume(below > 1e-3)  # else rounding decides
    settings = {"lr": 0.5, "alpha": alpha, "momentum": momentum, "weight_decay": weight_decay}
    settings |= {"centered": centered, "eps": eps, "use_tf_variant": True}
    found = trained(lambda p: poptorch.optim.RMSprop(p, **settings))
    assert found == pytest.approx(weight, rel=1e-4, abs=1e-4)


def test_the_form_of_rmsprop_is_compiled_in():
    model = Weighted(2.0)
    optimizer = poptorch.optim.RMSprop(model.parameters(), lr=0.1, use_tf_variant=True)
    executor = poptorch.trainingModel(model, None, optimizer)
    executor(torch.ones(1))
    assert optimizer.state_dict()["ipu_state"]["Accl1___w"].item() == pytest.approx(1.0)
    with pytest.raises(poptorch.Error, match="Can not replace optimizer of type"):
        executor.setOptimizer(poptorch.optim.RMSprop(model.parameters(), lr=0.1))


@pytest.mark.parametrize("bias_correction", [None, True, False])
def test_lamb_is_the_hosts(bias_correction):
    settings = {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.5, "max_weight_norm": 1.5}
    settings["bias_correction"] = bias_correction
    reference = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = poptorch.optim.LAMB([reference], **settings)
    for gradient in GRADIENTS:
        reference.grad = torch.tensor([gradient])
        optimizer.step()
    found = trained(lambda p: poptorch.optim.LAMB(p, **settings))
    assert found == pytest.approx(float(reference), rel=1e-5)


def test_without_an_optimizer_sgd_trains():
    model = Weighted(2.0)
    poptorch.trainingModel(model)(torch.ones(1))
    assert float(model.w) == pytest.approx(1.99)


def test_numbers_change_with_set_optimizer_only():
    model = Weighted(0.0)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    executor = poptorch.trainingModel(model, None, optimizer)
    compiled = []
    handle = poptorch.registerPreCompileHook(lambda: compiled.append(1))
    weights = []
    for lr, tell in ((1.0, False), (2.0, False), (2.0, True), (3.0, True)):
        optimizer.param_groups[0]["lr"] = lr
        if tell:
            executor.setOptimizer(optimizer)
        executor(torch.ones(1))
        weights.append(float(model.w))
    handle.remove()
    assert weights == [-1, -2, -4, -7]
    assert len(compiled) == 1


def sgd(**settings):
    return lambda p: poptorch.optim.SGD(p, **{"lr": 1.0, **settings})


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (sgd(), sgd(weight_decay=0.5), "Can not replace a constant value with a non constant"),
        (sgd(weight_decay=0.5), sgd(), "Can not replace a non constant value with a constant"),
        (sgd(), poptorch.optim.Adam, r"Can not replace optimizer of type SGD\(.* with .* Adam"),
        (sgd(), lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5), "Can not replace optimizer"),
    ],
)
def test_what_is_compiled_in_cannot_change(first, second, words):
    model = Weighted()
    executor = poptorch.trainingModel(model, None, first(model.parameters()))
    executor(torch.ones(1))
    with pytest.raises(poptorch.Error, match=words):
        executor.setOptimizer(second(model.parameters()))
    before = float(model.w)
    executor(torch.ones(1))
    assert float(model.w) < before
    executor.destroy()
    executor.setOptimizer(second(model.parameters()))
    executor(torch.ones(1))


def test_parameters_outside_the_groups_stay():
    model = torch.nn.Linear(1, 1)
    before = model.bias.detach().clone()
    executor = poptorch.trainingModel(Loss(model), None, poptorch.optim.SGD([model.weight], lr=1.0))
    executor(torch.ones(1, 1))
    assert torch.equal(model.bias, before)


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return poptorch.identity_loss(self.model(x), "sum")


@pytest.mark.parametrize("kind", [poptorch.optim.SGD, poptorch.optim.Adam, poptorch.optim.AdamW])
def test_max_grad_norm_clips_the_norm_of_all_gradients(kind):
    """As the equation says, without an epsilon; the loss scale does not count."""
    model = Loss(torch.nn.Linear(3, 2))
    reference = copy.deepcopy(model.model)
    optimizer = kind(model.parameters(), lr=0.25, max_grad_norm=0.5, loss_scaling=8.0)
    theirs = getattr(torch.optim, kind.__name__)(reference.parameters(), lr=0.25)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    executor = poptorch.trainingModel(model, options, optimizer)
    x = torch.randn(4, 3)
    for scale in (1.0, 0.01, 10.0):
        executor(scale * x)
        theirs.zero_grad()
        (reference(scale * x).sum() / 2).backward()
        norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
        for parameter in reference.parameters():
            parameter.grad *= 0.5 / max(0.5, norm)
        theirs.step()
    executor.copyWeightsToHost()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_half_gradients_are_summed_in_float32(name):
    """Eight of 20,000 do not fit float16; their mean does."""
    model = Weighted(1.0).half()
    optimizer = getattr(poptorch.optim, name)(model.parameters(), lr=2.0**-10)
    options = poptorch.Options()
    options.Training.gradientAccumulation(8)
    executor = poptorch.trainingModel(model, options, optimizer)
    executor(torch.full((8, 1), 20000.0, dtype=torch.float16))
    executor.copyWeightsToHost()
    assert model.w.isfinite().all()
    if name == "SGD":
        assert model.w.item() == pytest.approx(1.0 - 20000.0 / 1024, abs=0.01)


def test_the_loss_is_one_value():
    class Two(Weighted):
        def forward(self, x):
            return super().forward(x) + super().forward(x)

    class Unmarked(Weighted):
        def forward(self, x):
            return self.w * x

    with pytest.raises(poptorch.Error, match="Multiple independent losses found in graph"):
        poptorch.trainingModel(Two())(torch.ones(1))
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph!"):
        poptorch.trainingModel(Unmarked())(torch.ones(1))
    with pytest.raises(AssertionError, match="type! 'median' is none of 'sum', 'mean'"):
        poptorch.identity_loss(torch.ones(1), "median")
