"""Give the loop's tests a machine without a compiler."""

import pytest

from ipu_dynamo.keras import IPUStrategy, loop
from ipu_dynamo.keras.extensions import Extension
from tests.keras.loop.plain_programs import PlainMachine

if not hasattr(Extension, "fit"):
    for name in [
        "fit",
        "evaluate",
        "predict",
        "train_on_batch",
        "predict_on_batch",
        "make_train_function",
        "make_test_function",
        "make_predict_function",
    ]:
        setattr(Extension, name, getattr(loop, name))
    Extension.test_on_batch = loop.evaluate_on_batch
    Extension.get_metrics_result = lambda self: loop.metrics_result(
        self, super(Extension, self).get_metrics_result
    )


@pytest.fixture
def machine(monkeypatch):
    """Plain Keras in the place of programs, inside a strategy's scope."""
    machine = PlainMachine()
    machine.install(monkeypatch)
    with IPUStrategy().scope():
        yield machine
