"""Check the optimizer's state on the device: its names and values, and how it is taken back."""

import copy
import io

import pytest
import torch

import poptorch
from tests.poptorch.executor.models import Weighted

GRADIENTS = [1.0, -2.0, 0.5]


def training(optimizer_of, model=None, accumulation=1, automatic=False):
    """A model, its optimizer, and what trains it."""
    model = model or Weighted(2.0)
    optimizer = optimizer_of(model.parameters())
    options = poptorch.Options().showCompilationProgressBar(False)
    options.Training.gradientAccumulation(accumulation)
    options.Training.setAutomaticLossScaling(automatic)
    return model, optimizer, poptorch.trainingModel(model, options, optimizer)


def run(executor, gradients=GRADIENTS, accumulation=1):
    for gradient in gradients:
        executor(torch.full((accumulation,), gradient))


def shown(optimizer):
    state = optimizer.state_dict()
    return {key: {n: round(v.item(), 5) for n, v in state[key].items()} for key in state
            if key.startswith("ipu")}  # fmt: skip


def test_there_is_none_before_compiling():
    _, optimizer, executor = training(lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.5))
    assert optimizer.state_dict()["ipu_state"] is None
    executor.compile(torch.ones(1))
    assert shown(optimizer)["ipu_state"] == {"Accl1___w": 0.0}


def test_the_state_is_read_when_it_changed_and_when_the_device_is_left(caplog):
    _, optimizer, executor = training(lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.5))
    poptorch.logger.setLevel("DEBUG")
    poptorch.logger.addHandler(caplog.handler)
    try:
        run(executor)
        assert optimizer.host_state_is_dirty
        optimizer.state_dict()
        assert "cached optimiser" not in caplog.text
        optimizer.state_dict()
        assert "Using cached optimiser state dict" in caplog.text
        run(executor)
        assert optimizer.host_state_is_dirty
        executor.detachFromDevice()
        assert not optimizer.host_state_is_dirty
    finally:
        poptorch.logger.removeHandler(caplog.handler)
        poptorch.logger.setLevel("WARNING")


def test_what_is_loaded_before_compiling_holds():
    def make(parameters):
        return poptorch.optim.Adam(parameters, lr=0.1, loss_scaling=2.0)

    _, first, executor = training(make)
    run(executor)
    loaded = first.state_dict()
    _, second, other = training(make)
    second.load_state_dict(loaded)
    assert shown(second) == shown(first)
    other.compile(torch.ones(1))
    assert shown(second) == shown(first)
    other.detachFromDevice()
    assert shown(second) == shown(first)
    run(other)
    run(executor)
    assert shown(second)["ipu_state"]["Step___w"] == 2 * len(GRADIENTS)


def test_velocity_is_scaled_as_the_loss():
    settings = {"lr": 0.5, "momentum": 0.5, "dampening": 0.25, "loss_scaling": 8.0}
    _, optimizer, executor = training(lambda p: poptorch.optim.SGD(p, **settings))
    velocity = 0.0
    for gradient in GRADIENTS:
        velocity = 0.5 * velocity + 0.75 * gradient
    run(executor)
    assert shown(optimizer)["ipu_state"]["Accl1___w"] == 8 * velocity
    assert shown(optimizer)["ipu_param"]["scaledLearningRate2___specific___w"] == 0.5 / 8


def test_combined_velocity_is_prepared_for_the_next_step():
    settings = {"lr": 0.5, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.5}
    _, optimizer, executor = training(
        lambda p: poptorch.optim.SGD(p, use_combined_accum=True, velocity_scaling=4.0, **settings)
    )
    accumulator, weight = 0.75 * 4.0 * 0.5 * 2.0, 2.0
    executor.compile(torch.ones(1))
    assert shown(optimizer)["ipu_state"] == {"Accl___w": accumulator}
    for gradient in GRADIENTS:
        accumulator += 0.75 * 4.0 * gradient
        weight -= 0.5 / 4.0 * accumulator
        accumulator = 0.5 * accumulator + 0.75 * 4.0 * 0.5 * weight
    run(executor)
    assert shown(optimizer)["ipu_state"] == {"Accl___w": pytest.approx(accumulator, abs=1e-5)}


def test_adam_shows_moments_and_steps():
    _, optimizer, executor = training(
        lambda p: poptorch.optim.Adam(p, lr=0.1, betas=(0.5, 0.75)), accumulation=2
    )
    run(executor, accumulation=2)
    first = second = 0.0
    for gradient in GRADIENTS:
        first, second = 0.5 * first + 0.5 * gradient, 0.75 * second + 0.25 * gradient**2
    assert shown(optimizer)["ipu_state"] == {
        "Accl1___w": first, "Accl2___w": round(second, 5), "Step___w": 3.0,
    }  # fmt: skip


def test_groups_have_numbers_of_their_own():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Weighted(1.0), Weighted(2.0)

        def forward(self, x):
            return poptorch.identity_loss(self.a.w * x + self.b.w * x, "sum")

    model = Two()
    groups = [{"params": model.a.parameters()}, {"params": model.b.parameters(), "lr": 0.2}]
    _, optimizer, executor = training(lambda _: poptorch.optim.RMSprop(groups, lr=0.1), model)
    run(executor)
    numbers = shown(optimizer)["ipu_param"]
    assert numbers["learningRate___specific___a.w"] == 0.1
    assert numbers["learningRate___specific___b.w"] == 0.2


@pytest.mark.parametrize(
    "make",
    [
        lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.5, loss_scaling=2.0),
        lambda p: poptorch.optim.SGD(
            p, lr=0.1, momentum=0.5, weight_decay=0.5, use_combined_accum=True
        ),
        lambda p: poptorch.optim.AdamW(p, lr=0.1),
        lambda p: poptorch.optim.LAMB(p, lr=0.1, max_weight_norm=3.0),
        lambda p: poptorch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_training_goes_on_from_a_checkpoint(make, compiled):
    model, optimizer, executor = training(make)
    run(executor)
    file = io.BytesIO()
    torch.save([copy.deepcopy(model.state_dict()), optimizer.state_dict()], file)
    other, its_optimizer, its_executor = training(make)
    if compiled:
        run(its_executor, [3.0])
    file.seek(0)
    weights, state = torch.load(file)
    its_optimizer.load_state_dict(state)
    if compiled:
        its_executor.load_state_dict(weights)
    else:
        other.load_state_dict(weights)
    for one in (executor, its_executor):
        run(one)
    assert float(other.w) == pytest.approx(float(model.w), rel=1e-6)
    assert shown(its_optimizer)["ipu_state"] == pytest.approx(shown(optimizer)["ipu_state"])


def test_another_optimizer_keeps_the_state():
    make = lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.5)  # noqa: E731
    model, optimizer, executor = training(make)
    run(executor, [1.0])
    other = make(model.parameters())
    executor.setOptimizer(other)
    run(executor, [1.0])
    assert shown(optimizer)["ipu_state"]["Accl1___w"] == 1.0
    assert shown(other)["ipu_state"]["Accl1___w"] == 1.5
    executor.destroy()
    assert shown(other)["ipu_state"]["Accl1___w"] == 1.5


def test_the_automatic_factor_is_part_of_the_state():
    def make(parameters):
        return poptorch.optim.SGD(parameters, lr=0.0, loss_scaling=2.0)

    _, optimizer, executor = training(make, Weighted(1.0).half(), automatic=True)
    executor.compile(torch.ones(1).half())
    assert shown(optimizer)["ipu_state"] == {"lossScaleUpdateFactor": 1.0}
    for _ in range(3):
        executor(torch.ones(1).half())
    assert shown(optimizer)["ipu_state"] == {"lossScaleUpdateFactor": 8.0}
    assert shown(optimizer)["ipu_param"]["lossScaling_FLOAT"] == 2.0
    _, its_optimizer, its_executor = training(make, Weighted(1.0).half(), automatic=True)
    its_optimizer.load_state_dict(optimizer.state_dict())
    its_executor(torch.ones(1).half())
    assert shown(its_optimizer)["ipu_state"] == {"lossScaleUpdateFactor": 16.0}
