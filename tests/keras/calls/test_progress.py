"""Check what is shown before the first execution of a model."""

import pytest

from ipu_dynamo.keras import IPUStrategy
from ipu_dynamo.progress import PROGRESS
from tests.keras.loop.cases import arrays, small_model
from tests.terminals import shown


@pytest.fixture(autouse=True)
def shows(monkeypatch):
    monkeypatch.delenv(PROGRESS, raising=False)
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


def run(**how):
    x, y = arrays(8)
    with IPUStrategy().scope(), shown() as seen:
        model = small_model(2)
        model.fit(x, y, batch_size=2, epochs=2, validation_data=(x, y), **how)
        model.predict(x, batch_size=2, **how)
    return seen


def test_methods_show_what_they_compile_before_the_first_execution():
    seen = run()
    titles = [audience.title.partition(" of ")[0] for audience in seen.jobs]
    assert titles == ["compiling fit", "compiling evaluate", "compiling predict"]
    for audience in seen.jobs:
        assert {"tracing", "passes", "functions"} <= set(audience.kinds)
        for text in seen.texts.values():
            assert f"{audience.title}: 100%" in text


def test_with_verbose_0_nothing_is_shown():
    assert not run(verbose=0).jobs
