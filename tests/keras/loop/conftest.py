"""Give the loop's tests a machine without a compiler."""

import pytest

from ipu_dynamo.keras import IPUStrategy
from tests.keras.loop.plain_programs import PlainMachine


@pytest.fixture
def machine(monkeypatch):
    """Plain Keras in the place of programs, inside a strategy's scope."""
    machine = PlainMachine()
    machine.install(monkeypatch)
    with IPUStrategy().scope():
        yield machine
