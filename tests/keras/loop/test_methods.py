"""Check methods on single batches, the functions that are made, logs and results."""

import logging

import keras
import numpy as np
import pytest
import torch

from ipu_dynamo.keras.loop.execution import is_execution_function
from tests.keras.loop.cases import Recorder, arrays, outside_scopes, small_model


def plain_like(model):
    """Plain Keras' model with the same weights."""
    with outside_scopes():
        plain = small_model()
        plain.set_weights(model.get_weights())
        return plain


@pytest.mark.parametrize("return_dict", [False, True])
def test_single_batches_are_as_in_plain_keras(machine, return_dict):
    x, y = arrays(8)
    weights = np.linspace(0, 1, 8)
    model = small_model(16)  # one step, whatever S is
    plain = plain_like(model)
    for _ in range(2):
        ours = model.train_on_batch(x, y, weights, return_dict=return_dict)
        theirs = plain.train_on_batch(x, y, weights, return_dict=return_dict)
        assert ours == pytest.approx(theirs, rel=1e-6)
    ours, theirs = (m.test_on_batch(x, y, return_dict=return_dict) for m in (model, plain))
    assert ours == pytest.approx(theirs, rel=1e-6)
    np.testing.assert_allclose(model.predict_on_batch(x), plain.predict_on_batch(x), rtol=1e-6)
    assert [shape.steps for _, shape in machine.shapes] == [1] * 4


def test_single_batches_take_class_weights(machine):
    x, _ = arrays(8)
    y = np.arange(8) % 2
    model = small_model()
    plain = plain_like(model)
    for each in (model, plain):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        each.compile("sgd", loss, metrics=["accuracy"])
    ours, theirs = (m.train_on_batch(x, y, class_weight={0: 1.0, 1: 3.0}) for m in (model, plain))
    assert ours == pytest.approx(theirs, rel=1e-6)
    with pytest.raises(ValueError, match="at the same time"):
        model.train_on_batch(x, y, np.ones(8), class_weight={0: 1.0, 1: 3.0})


@pytest.mark.parametrize(("replicas", "micro_batches"), [(2, 1), (1, 4)])
@pytest.mark.parametrize(
    ("method", "other"),
    [("train_on_batch", "fit"), ("test_on_batch", "evaluate"), ("predict_on_batch", "predict")],
)
def test_a_batch_that_is_no_execution_is_refused(machine, method, other, replicas, micro_batches):
    machine.replicas, machine.micro_batches = replicas, micro_batches
    data = arrays(4)[:1] if method == "predict_on_batch" else arrays(4)
    with pytest.raises(ValueError, match=rf"{method} runs one batch.* Use {other}"):
        getattr(small_model(), method)(*data)
    assert not machine.shapes


def test_functions_run_an_execution(machine):
    x, y = arrays(16)
    model = small_model(4)
    model.fit(x, y, batch_size=4, verbose=0)
    function = model.make_train_function()
    assert function is model.train_function
    assert model.make_train_function(force=True) is not function
    batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 16, 4)]
    assert model.train_function(batches).keys() == {"loss", "mae"}
    assert model.make_predict_function()([(x[:4],), (x[4:8],)]).shape == (8, 2)
    machine.replicas = 3
    with pytest.raises(ValueError, match="4 batches cannot be divided among 3 replicas"):
        model.train_function(batches)


def test_functions_are_ours_in_a_scope_and_kerass_elsewhere(machine):
    x, y = arrays(16)
    model = small_model()
    for kind, call in {
        "train": lambda: model.fit(x, y, verbose=0),
        "test": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
    }.items():
        for _ in range(2):
            call()
            assert is_execution_function(getattr(model, f"{kind}_function"))
            with outside_scopes():
                call()
                assert not is_execution_function(getattr(model, f"{kind}_function"))
    assert len(machine.shapes) == 6


def test_metrics_are_those_of_the_last_execution_until_the_host_assigns_one(machine):
    x, y = arrays(16)
    model = small_model(2)
    model.fit(x, y, batch_size=4, verbose=0)
    logs = model.get_metrics_result()
    assert logs["loss"] == model.history.history["loss"][-1]
    model.metrics[0].total.assign(8.0)
    model.metrics[0].count.assign(2.0)
    assert model.get_metrics_result()["loss"] == 4.0
    model.reset_metrics()
    assert model.get_metrics_result()["loss"] == 0.0


def test_evaluate_returns_what_plain_keras_does(machine):
    x, y = arrays(16)
    model = small_model(2)
    plain = plain_like(model)
    for kwargs in ({}, {"return_dict": True}, {"sample_weight": np.linspace(0, 1, 16)}):
        ours, theirs = (m.evaluate(x, y, batch_size=4, verbose=0, **kwargs) for m in (model, plain))
        assert ours == pytest.approx(theirs, rel=1e-6)
    with pytest.raises(ValueError, match=r"not recognized.*typo"):
        model.evaluate(x, y, typo=1)


def test_outputs_keep_their_structure(machine):
    inputs = keras.Input((3,))
    outputs = {"a": keras.layers.Dense(2)(inputs), "b": [keras.layers.Dense(1)(inputs)]}
    model = keras.Model(inputs, outputs)
    model.compile(steps_per_execution=2)
    x, _ = arrays(16)
    result = model.predict(x, batch_size=2, verbose=0)
    assert result["a"].shape == (16, 2)
    assert result["b"][0].shape == (16, 1)
    np.testing.assert_allclose(result["a"], model(x)["a"].detach(), rtol=1e-5, atol=1e-6)


def test_an_unbuilt_model_is_built_by_its_first_data(machine):
    x, y = arrays(16)
    for run in (
        lambda model: model.predict(x, batch_size=4, verbose=0),
        lambda model: model.predict_on_batch(x),
        lambda model: model.evaluate(x, y, batch_size=4, verbose=0),
        lambda model: model.fit(x, y, batch_size=4, verbose=0),
        lambda model: model.train_on_batch(x, y),
    ):
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "mse", steps_per_execution=2)
        run(model)
        assert model.built


def test_log_lines_say_what_an_execution_amounts_to(machine, caplog):
    machine.replicas = 2
    x, y = arrays(96)
    model = small_model(4)
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=2)
    with caplog.at_level(logging.INFO, logger="ipu_dynamo.keras"):
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert [record.getMessage() for record in caplog.records] == [
        "effective batch size 16 = batch 4 x gradient accumulation 2 x replicas 2; "
        "weight updates: 2 per execution, 6 per epoch"
    ]
    caplog.clear()
    single = small_model(1)
    with caplog.at_level(logging.INFO, logger="ipu_dynamo.keras"):
        single.predict(x, batch_size=4, verbose=0)
        single.evaluate(x, y, batch_size=4, verbose=0)
    assert ["steps_per_execution=n" in r.getMessage() for r in caplog.records] == [True]


def test_the_progress_bar_shows_the_mean_of_a_list(machine, capsys):
    machine.replicas = 2
    x, y = arrays(16)
    model = small_model(2)
    model.set_replication_options("list")
    recorder = Recorder()
    model.fit(x, y, batch_size=2, epochs=1, shuffle=False, callbacks=[recorder], verbose=2)
    loss = recorder.logs("on_epoch_end")[-1]["loss"]
    assert isinstance(loss, list)
    assert f"loss: {np.mean(loss):.4f}" in capsys.readouterr().out
    results = model.evaluate(x, y, batch_size=2, verbose=1)
    assert [len(result) for result in results] == [2, 2]
    assert f"loss: {np.mean(results[0]):.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "train_on_batch"])
def test_a_users_own_method_is_refused_as_it_would_not_be_called(machine, method):
    class Own(keras.Sequential):
        pass

    setattr(Own, method, lambda self, *args, **kwargs: None)
    model = Own([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match=f"class Own of model .* overrides {method}"):
        getattr(model, method)(arrays(8)[0])


def test_torch_state_is_that_of_keras(machine):
    modes = []
    x, y = arrays(8)
    model = small_model()
    see = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: modes.append(model.training)
    )
    see.on_test_batch_end = lambda batch, logs=None: modes.append(model.training)
    model.fit(x, y, batch_size=4, validation_data=(x, y), callbacks=[see], verbose=0)
    assert modes == [True, True, False, False]
    assert not model.training
    assert torch.is_grad_enabled()
