"""Compare 20 updates of every optimiser with plain Keras: flags, schedules, loss scaling."""

import itertools

import pytest

from tests.keras.step.optimizer_cases import (
    CLASSES,
    FLAGS,
    SCHEDULED,
    SCHEDULES,
    differences,
    train_both,
)

EVERY = [*itertools.product((*CLASSES, "MultiOptimizer"), FLAGS)]
# each class once, each flag at least once, and each schedule
SAMPLE = [
    (name, list(FLAGS)[i % len(FLAGS)]) for i, name in enumerate((*CLASSES, "MultiOptimizer"))
]
RATES = dict(zip(SAMPLE, SCHEDULES, strict=False))
ALL_SCHEDULES = [*itertools.product(SCHEDULED, SCHEDULES)]


def _mark(cases, sample):
    marks = [() if case in sample else pytest.mark.slow for case in cases]
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "flag"), _mark(EVERY, SAMPLE))
def test_updates_are_those_of_plain_keras(name, flag):
    plain, model = train_both(name, flag, SCHEDULES.get(RATES.get((name, flag)), lambda: 0.01))
    apart = differences(plain, model)
    assert max(apart.values()) <= 1e-5, apart
    if (name, flag) in RATES:
        assert float(model.optimizer.learning_rate) == pytest.approx(
            float(plain.optimizer.learning_rate), rel=1e-5
        )


@pytest.mark.few(1)
@pytest.mark.inductor
@pytest.mark.parametrize(("name", "flag"), [("Adam", "ema"), ("Nadam", "loss_scale")])
def test_compiled_updates_are_those_of_plain_keras(name, flag):
    plain, model = train_both(name, flag)
    apart = differences(plain, model)
    assert max(apart.values()) <= 1e-5, apart
    if name == "Nadam":  # a variable that Keras does not track is a state, too
        products = [m.optimizer.inner_optimizer._u_product.numpy() for m in (plain, model)]
        assert products[0] == pytest.approx(products[1], rel=1e-5)
        assert products[0] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), ALL_SCHEDULES)
def test_schedules_are_those_of_plain_keras(name, schedule):
    plain, model = train_both(name, "plain", SCHEDULES[schedule])
    apart = differences(plain, model)
    assert max(apart.values()) <= 1e-5, apart
    assert float(model.optimizer.learning_rate) == pytest.approx(
        float(plain.optimizer.learning_rate), rel=1e-5
    )


def test_an_infinite_gradient_halves_the_scale_and_leaves_out_the_update():
    plain, model = train_both("Adam", "loss_scale")
    assert int(model.optimizer.iterations.value) == 19
    assert float(model.optimizer.dynamic_scale.value) == float(plain.optimizer.dynamic_scale.value)
    assert float(model.optimizer.dynamic_scale.value) != 2.0**10
