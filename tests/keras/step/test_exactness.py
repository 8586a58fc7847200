"""Compare fit, evaluate and predict with plain Keras on one big batch."""

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, note, settings

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
@pytest.mark.examples(8)
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
