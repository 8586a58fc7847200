"""Run what these tests compile on the eager engine, where they do not ask for another."""

import pytest


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
