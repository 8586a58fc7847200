"""Check which names each optimiser has on the device, and their values, in every situation."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import poptorch
from poptorch import optim
from tests.poptorch.executor.models import Weighted


@dataclass(frozen=True)
class Case:
    """An optimiser with its settings, and what the device has for it.

    Attributes:
        numbers: of the parameter w; `lossScaling_FLOAT` is of none.
        states: names before "___w".
    """

    kind: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    numbers: dict[str, float]
    states: tuple[str, ...]
    accumulation: int = 1
    replicas: int = 1
    running: bool = False
    total: bool = False
    extra: tuple[str, ...] = field(default=())  # states whose names end otherwise

    def __str__(self) -> str:
        given = "-".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.kind.__name__}-{given}-{self.accumulation}-{self.replicas}"


_VELOCITY = {"lr": 0.5, "momentum": 0.25, "weight_decay": 0.5, "loss_scaling": 8.0}
_COMBINED = {**_VELOCITY, "use_combined_accum": True, "velocity_scaling": 4.0}
_ADAM = {"lr": 0.125, "betas": (0.5, 0.75), "eps": 0.25, "weight_decay": 0.5, "loss_scaling": 2.0}
_ADAM_NUMBERS = {
    "learningRate": 0.125,
    "weightDecay": 0.5,
    "adamBeta1": 0.5,
    "adamBeta2": 0.75,
    "adamEps": 0.25,
    "lossScaling_FLOAT": 2.0,
}
_MOMENTS = ("Accl1", "Accl2", "Step")
CASES = [
    Case(
        optim.SGD, {"lr": 0.5}, {"scaledLearningRate0": 0.5, "weightDecayScaleFactor0": 1.0}, ()
    ),
    Case(
        optim.SGD,
        {"lr": 0.5, "dampening": 0.5, "weight_decay": 0.2, "loss_scaling": 4.0},
        {
            "scaledLearningRate0": 0.0625,
            "weightDecayScaleFactor0": 0.95,
            "lossScaling_FLOAT": 4.0,
        },
        (),
    ),
    Case(
        optim.SGD,
        {"lr": 0.5},
        {"scaledLearningRate0": 0.5 / 8, "weightDecayScaleFactor0": 1.0},
        (),
        accumulation=4,
        replicas=2,
    ),
    Case(
        optim.SGD,
        {"lr": 0.5},
        {"scaledLearningRate0": 0.5, "weightDecayScaleFactor0": 1.0},
        (),
        accumulation=4,
        total=True,
    ),
    Case(
        optim.SGD,
        {"lr": 0.5, "momentum": 0.25},
        {"scaledLearningRate2": 0.5, "scaledMomentum2": 0.25},
        ("Accl1",),
    ),
    Case(
        optim.SGD,
        {**_VELOCITY, "dampening": 0.5},
        {
            "scaledLearningRate2": 0.5 / 8,
            "scaledMomentum2": 0.25,
            "dampeningScaleFactor2": 0.5 / 6,
            "scaledWeightDecay1": 0.5 * 0.5 * 8,
            "lossScaling_FLOAT": 8.0,
        },
        ("Accl1",),
        accumulation=3,
        replicas=2,
    ),
    Case(
        optim.SGD,
        {**_VELOCITY, "nesterov": True},
        {
            "scaledLearningRate2": 0.5 / 8,
            "scaledMomentum2": 0.25,
            "dampeningScaleFactor2": 1 / 2,
            "scaledWeightDecay1": 0.5 * 8,
            "nesterovGradScaleFactor2": 8.0,
            "nesterovDampeningScaleFactor2": 2 / 8,
            "sgdMomentum": 0.25,
            "sgdWeightDecay": 0.5,
            "lossScaling_FLOAT": 8.0,
        },
        ("Accl1",),
        accumulation=2,
    ),
    Case(
        optim.SGD,
        {**_COMBINED, "dampening": 0.5},
        {
            "scaledLearningRate1": 0.5 / 4,
            "scaledMomentum1": 0.25,
            "dampeningScaleFactor1": 0.5 * 4 / 8,
            "scaledWeightDecay1": 0.5 * 0.5 * 4,
            "lossScaling_FLOAT": 8.0,
        },
        ("Accl",),
    ),
    Case(
        optim.SGD,
        {**_COMBINED, "nesterov": True},
        {
            "scaledLearningRate1": 0.5 / 4 / 2,
            "scaledMomentum1": 0.25 / 2,
            "dampeningScaleFactor1": 4 / 8 / 3,
            "scaledWeightDecay1": 0.5 * 4,
            "nesterovGradScaleFactor1": 4.0 * 2,
            "nesterovDampeningScaleFactor1": 3 / 4,
            "sgdMomentum": 0.25,
            "sgdWeightDecay": 0.5,
            "lossScaling_FLOAT": 8.0,
        },
        ("Accl",),
        accumulation=3,
        replicas=2,
        extra=("Accl___w_nesterovGrad",),
    ),
    Case(optim.Adam, {"lr": 0.125}, {"learningRate": 0.125}, _MOMENTS),
    Case(
        optim.Adam,
        _ADAM,
        {**_ADAM_NUMBERS, "adamGradientScaling": 1 / 8},
        _MOMENTS,
        accumulation=4,
    ),
    Case(
        optim.AdamW,
        _ADAM,
        {**_ADAM_NUMBERS, "adamGradientScaling": 1 / 2},
        _MOMENTS,
        accumulation=4,
        running=True,
    ),
    Case(
        optim.LAMB,
        {**_ADAM, "max_weight_norm": 3.0},
        {**_ADAM_NUMBERS, "adamGradientScaling": 1 / 2, "maxWeightNorm": 3.0},
        _MOMENTS,
    ),
    Case(
        optim.LAMB,
        {"lr": 0.125, "bias_correction": False},
        {"learningRate": 0.125},
        ("Accl1", "Accl2"),
    ),
    Case(optim.RMSprop, {"lr": 0.125}, {"learningRate": 0.125}, ("Accl1",)),
    Case(
        optim.RMSprop,
        {
            "lr": 0.125, "alpha": 0.5, "eps": 0.25, "weight_decay": 0.5, "momentum": 0.75,
            "centered": True, "loss_scaling": 2.0,
        },
        {
            "learningRate": 0.125,
            "weightDecay": 0.5,
            "adaptiveAlpha": 0.5,
            "adaptiveEps": 0.25,
            "adaptiveMomentum": 0.75,
            "adaptiveGradientScaling": 1 / 2,
            "lossScaling_FLOAT": 2.0,
        },
        ("Accl1", "Accl2", "Accl3"),
    ),
]  # fmt: skip


def training(case, model, optimizer):
    options = poptorch.Options().showCompilationProgressBar(False)
    options.replicationFactor(case.replicas)
    options.Training.gradientAccumulation(case.accumulation)
    if case.running:
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(
            poptorch.MeanReductionStrategy.Running
        )
    if case.total:
        options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    return poptorch.trainingModel(model, options, optimizer)


def made(case):
    model = Weighted(2.0)
    optimizer = case.kind(model.parameters(), **case.settings)
    return optimizer, training(case, model, optimizer)


def rows(case):
    return torch.arange(1.0, 1 + case.accumulation * case.replicas)


def check(case, optimizer):
    """Compare the names and numbers of an optimiser with those of its row."""
    state = optimizer.state_dict()
    ends = {name: "" if name.startswith("loss") else "___specific___w" for name in case.numbers}
    expected = {f"{name}{ends[name]}": value for name, value in case.numbers.items()}
    numbers = {name: value.item() for name, value in state["ipu_param"].items()}
    assert numbers == pytest.approx(expected)
    assert {value.dtype for value in state["ipu_param"].values()} == {torch.float32}
    assert set(state["ipu_state"]) == {*(f"{name}___w" for name in case.states), *case.extra}
    return state["ipu_state"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_situation_has_the_names_and_numbers_of_the_optimiser(case):
    optimizer, executor = made(case)
    state = optimizer.state_dict()
    assert (state["ipu_state"], state["ipu_param"]) == (None, None)
    executor.compile(rows(case))
    compiled = check(case, optimizer)
    executor(rows(case))
    trained = check(case, optimizer)
    changed = [name for name in trained if not torch.equal(trained[name], compiled[name])]
    assert changed == [name for name in trained if name not in case.extra]
    executor.detachFromDevice()
    assert check(case, optimizer) == trained
    saved = optimizer.state_dict()
    executor.destroy()
    assert check(case, optimizer) == trained

    other, its_executor = made(case)
    other.load_state_dict(saved)
    assert check(case, other) == trained
    its_executor.compile(rows(case))
    assert check(case, other) == trained
    its_executor.model.load_state_dict(executor.model.state_dict())
    its_executor.copyWeightsToDevice()
    its_executor(rows(case))
    after = check(case, other)
    assert {name for name in after if not torch.equal(after[name], trained[name])} >= set(changed)
    if "Step___w" in after:
        assert after["Step___w"] == 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_state_has_are_tensors_of_the_program(case):
    optimizer, executor = made(case)
    executor.compile(rows(case))
    state, names = optimizer.state_dict(), set(executor.getTensorNames())
    assert names >= {*state["ipu_state"], *state["ipu_param"]}
    shared = case.settings.get("use_combined_accum", False)
    assert ("Accum___w" in names) == (case.accumulation > 1 and not shared)


def test_numbers_that_set_optimizer_changes_are_shown_at_once():
    case = CASES[-1]
    optimizer, executor = made(case)
    executor(rows(case))
    check(case, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    assert not optimizer.host_state_is_dirty
    executor.setOptimizer(optimizer)
    assert optimizer.state_dict()["ipu_param"]["learningRate___specific___w"] == 0.25
    executor.setOptimizer(optimizer)
    assert not optimizer.host_state_is_dirty


def test_a_constant_has_no_number():
    model = Weighted(2.0)
    optimizer = optim.SGD(model.parameters(), lr=0.5, loss_scaling=2.0)
    optimizer.variable_attrs.markAsConstant("lr")
    optimizer.variable_attrs.markAsConstant("loss_scaling")
    optimizer.variable_attrs.markAsVariable("momentum")
    training(CASES[0], model, optimizer).compile(torch.ones(1))
    state = optimizer.state_dict()
    assert state["ipu_param"] == {"scaledMomentum2___specific___w": 0.0}
    assert list(state["ipu_state"]) == ["Accl1___w"]


def test_each_group_has_the_names_of_its_own_variant():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Weighted(1.0), Weighted(2.0)

        def forward(self, x):
            return poptorch.identity_loss(self.a.w * x + self.b.w * x, "sum")

    def trained(kind):
        model = Two()
        groups = [
            {"params": model.a.parameters()},
            {"params": model.b.parameters(), "momentum": 0.5, "nesterov": True},
        ]
        optimizer = kind(groups, lr=0.25)
        executor = training(CASES[0], model, optimizer)
        for value in (1.0, -2.0, 3.0):
            executor(torch.tensor([value]))
        return model, optimizer, executor

    model, optimizer, executor = trained(optim.SGD)
    state = optimizer.state_dict()
    assert {name: value.item() for name, value in state["ipu_param"].items()} == {
        "scaledLearningRate0___specific___a.w": 0.25,
        "weightDecayScaleFactor0___specific___a.w": 1.0,
        "scaledLearningRate2___specific___b.w": 0.25,
    }
    assert list(state["ipu_state"]) == ["Accl1___b.w"]
    program = executor._debugGetPopartIR()
    assert program.count("(momentum, nesterov, ") == 1
    assert "momentum" not in program.partition("(%a.w by")[0].rpartition("type")[2]
    weights, velocity = [1.0, 2.0], 0.0
    for value in (1.0, -2.0, 3.0):
        velocity = 0.5 * velocity + value
        weights[0] -= 0.25 * value
        weights[1] -= 0.25 * (value + 0.5 * velocity)
    assert [float(model.a.w), float(model.b.w)] == weights


def test_numbers_next_to_half_weights_are_half():
    model = Weighted(2.0).half()
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.25)
    training(CASES[0], model, optimizer).compile(torch.ones(1).half())
    numbers = optimizer.state_dict()["ipu_param"]
    assert {name.split("_")[0]: value.dtype for name, value in numbers.items()} == {
        "scaledLearningRate2": torch.float32,
        "scaledMomentum2": torch.float16,
    }


def test_an_optimiser_with_half_accumulators_is_set_on_frozen_options():
    model = Weighted(2.0)
    options = poptorch.Options().showCompilationProgressBar(False)
    options.Training.gradientAccumulation(2)
    executor = poptorch.trainingModel(model, options, optim.Adam(model.parameters(), lr=0.125))
    half = optim.Adam(
        model.parameters(), lr=0.125, loss_scaling=2.0, accum_type=torch.float16
    )  # fmt: skip
    executor.setOptimizer(half)
    executor(torch.ones(2))
    numbers = half.state_dict()["ipu_param"]
    assert numbers["adamGradientScaling___specific___w"] == 0.5  # accumulators hold means already
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        executor.options.deviceIterations(2)


def test_reading_and_detaching_say_where_nothing_has_changed(caplog):
    _, executor = made(CASES[0])
    poptorch.logger.setLevel("DEBUG")
    poptorch.logger.addHandler(caplog.handler)
    try:
        executor(rows(CASES[0]))
        executor.detachFromDevice()
        assert "cached optimiser" not in caplog.text
        executor.attachToDevice()
        executor.detachFromDevice()
        assert "Using cached optimiser state dict" in caplog.text
    finally:
        poptorch.logger.removeHandler(caplog.handler)
        poptorch.logger.setLevel("WARNING")
