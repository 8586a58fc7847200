"""Compare fit, evaluate and predict with plain Keras on one big batch."""

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import Phase, given, note, settings

from ipu_dynamo.keras import IPUStrategy
from tests.keras.step.drawn_models import (
    Case,
    cases,
    data,
    fit_arguments,
    make_extended,
    make_model,
    strategy,
)

ROWS = 2


def _close(actual: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@settings(phases=[Phase.explicit, Phase.generate])
@pytest.mark.examples(50)
@pytest.mark.quick(2)
@given(case=cases())
def test_equals_plain_keras_on_the_whole_batch(case: Case) -> None:
    x, y, weights = data(case, rows=ROWS)
    tolerance = 1e-5 if case.replicas == 1 else 1e-3
    plain = make_model(case)
    whole = ROWS * case.accumulation * case.replicas
    options: dict[str, Any] = {"shuffle": False, "verbose": 0, "sample_weight": weights}
    options |= fit_arguments(case)
    with strategy(case).scope():
        model = make_extended(case)
        model.set_weights(plain.get_weights())
        logs = model.fit(x, y, batch_size=ROWS, epochs=2, **options).history
        results = model.evaluate(x, y, batch_size=ROWS, verbose=0, sample_weight=weights)
        outputs = model.predict(x, batch_size=ROWS, verbose=0)
    expected = plain.fit(x, y, batch_size=whole, epochs=2, **options).history
    note(f"{logs} {expected}")
    _close([logs[name] for name in expected], expected.values(), tolerance)
    _close(model.get_weights(), plain.get_weights(), tolerance)
    _close(
        np.atleast_1d(results),
        np.atleast_1d(plain.evaluate(x, y, batch_size=ROWS, verbose=0, sample_weight=weights)),
        tolerance,
    )
    plain_outputs = plain.predict(x, batch_size=ROWS, verbose=0)
    flat = (outputs, plain_outputs) if isinstance(outputs, list) else ([outputs], [plain_outputs])
    _close(*flat, tolerance)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "pipelined", [False, pytest.param(True, marks=pytest.mark.inductor)], ids=["alone", "pipelined"]
)
def test_masks_count_in_losses_and_metrics(pipelined: bool) -> None:
    words = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [2, 2, 1, 0], [1, 1, 1, 3]] * 6)
    targets = np.random.default_rng(0).normal(size=(24, 4, 2)).astype("float32")

    def logs_of(**options: Any) -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(4, 3, mask_zero=True), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        if options and pipelined:
            model.set_pipeline_stage_assignment([0, 1])
            model.set_pipelining_options(pipeline_schedule="Sequential")
        model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"], **options)
        model.fit(words, targets, batch_size=4, shuffle=False, verbose=0)
        return model.evaluate(words, targets, batch_size=4, verbose=0)

    expected = logs_of()
    with IPUStrategy(2 if pipelined else 1).scope():
        _close(logs_of(steps_per_execution=3), expected, 1e-5)
