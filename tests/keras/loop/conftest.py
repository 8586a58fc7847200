"""Give the loop's tests models, data, and a machine without a compiler."""

import sys
import types
from dataclasses import dataclass

import pytest

try:
    import ipu_dynamo.keras.step.programs  # noqa: F401
except ImportError:
    module = types.ModuleType("ipu_dynamo.keras.step.programs")

    @dataclass(frozen=True)
    class CallShape:
        steps: int
        accumulation: int
        replicas: int
        pipelined: bool

    module.CallShape = CallShape
    module.call_shape = module.program_for = module.replica_count = None
    module.micro_batches_needed = None
    sys.modules["ipu_dynamo.keras.step.programs"] = module

from ipu_dynamo.keras import loop
from ipu_dynamo.keras.extensions import Extension

if not hasattr(Extension, "fit"):
    for name in "fit evaluate predict train_on_batch test_on_batch predict_on_batch".split() + [
        "make_train_function",
        "make_test_function",
        "make_predict_function",
    ]:
        setattr(Extension, name, getattr(loop, name))
    Extension.get_metrics_result = lambda self: loop.metrics_result(
        self, super(Extension, self).get_metrics_result
    )

from ipu_dynamo.keras import IPUStrategy
from tests.keras.loop.plain_programs import PlainMachine


@pytest.fixture
def machine(monkeypatch):
    """Plain Keras in the place of programs, inside a strategy's scope."""
    machine = PlainMachine()
    machine.install(monkeypatch)
    with IPUStrategy().scope():
        yield machine
