"""Check what `inspect` and `explain` show of Keras models."""

import os

import pytest

os.environ["KERAS_BACKEND"] = "torch"  # before anything imports Keras

import keras
import numpy as np
from keras import layers

from ipu_dynamo import explain, inspect
from ipu_dynamo.keras import ipu
from tests.inspection.looking import check_members, nothing_changes

X = np.arange(512, dtype="float32").reshape(64, 8) / 512
Y = np.arange(64) % 3


@pytest.fixture
def model(request, monkeypatch):
    if request.node.get_closest_marker("inductor") is None:
        monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    with ipu.ipu_strategy.IPUStrategy(num_ipus=2).scope():
        model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, "relu", name="one"), layers.Dense(3, name="two")]
        )
        model.set_pipeline_stage_assignment([0, 1])
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, steps_per_execution=4)
        yield model


def weights(model):
    return [np.array(weight) for weight in model.get_weights()]


def test_explain_before_and_after_fit_is_of_the_program_that_fit_runs(model, monkeypatch):
    assert "not compiled yet" in repr(inspect(model))
    before = weights(model)
    lowered = explain(model, X[:16], Y[:16])
    assert "program training: 2 stages on 2 IPUs, 4 micro-batches" in str(lowered)
    assert inspect(model).programs == ()
    assert all(map(np.array_equal, weights(model), before))
    model.fit(X, Y, batch_size=16, verbose=0)
    trained = weights(model)
    with nothing_changes(monkeypatch):
        seen = check_members(model)
        assert str(explain(model, X[:16])) == str(seen)
    assert all(map(np.array_equal, weights(model), trained))
    assert seen.program.text == lowered.program.text
    assert [row.ipu for row in seen.cut.rows] == [0, 1]
    model.predict(X, batch_size=16, verbose=0)
    seen = inspect(model)
    assert [entry.program.kind for entry in seen.programs] == ["training", "inference"]
    assert seen.program is seen.programs[1]
    model.fit(X, Y, batch_size=16, verbose=0)
    assert inspect(model).program.program.kind == "training"


@pytest.mark.inductor
def test_on_inductor(model):
    model.fit(X, Y, batch_size=16, verbose=0)
    assert "2 stages on 2 IPUs" in str(explain(model, X[:16]))
