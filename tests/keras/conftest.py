"""Choose Keras' backend before anything imports Keras, and how programs run."""

import os

import pytest

os.environ["KERAS_BACKEND"] = "torch"


@pytest.fixture(autouse=True)
def _engine(request, monkeypatch):
    """Let programs run operator by operator, but in tests of compiled ones."""
    if request.node.get_closest_marker("inductor") is None:
        monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
