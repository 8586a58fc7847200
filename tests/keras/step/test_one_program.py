"""Check that a fit is one program, in Keras' own memory, compiled again only where it has to be."""

from typing import Any

import keras
import numpy as np
import pytest
import torch

import ipu_dynamo
from ipu_dynamo.errors import CompileError
from ipu_dynamo.keras import IPUStrategy
from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.options.options import START
from tests.whole_step import start_now
from tests.whole_step.start_now import HeldEngine

L = keras.layers
X = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
Y = np.random.default_rng(1).standard_normal((32, 3)).astype("float32")


class Counting(L.Dense):
    """Counts how often its Python runs on numbers, or stand-ins for them."""

    calls = 0

    def call(self, inputs: Any, training: Any = None) -> Any:
        if not isinstance(inputs, keras.KerasTensor) and inputs.device.type != "meta":
            type(self).calls += 1
        return super().call(inputs)


@pytest.fixture
def model():
    Counting.calls = 0
    keras.utils.set_random_seed(0)
    with IPUStrategy().scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                Counting(5, activation="tanh", name="first"),
                L.Dense(3, name="last"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=4)
        yield model


def program(model: Any, kind: str = "fit") -> Any:
    (found,) = [p for key, p in state_of(model).programs.items() if key[0] == kind]
    return found.compiled.program


def test_fit_of_several_epochs_is_one_program(model):
    known = len(ipu_dynamo.programs())

    class Rate(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.01 / (1 + epoch)

    model.fit(X, Y, batch_size=4, epochs=4, verbose=0, callbacks=[Rate()])
    new = list(ipu_dynamo.programs())[known:]
    assert [p.kind for p in new] == ["training"]
    assert Counting.calls == 1
    assert int(model.optimizer.iterations.value) == 32


def test_the_program_names_lines_of_layers_and_functions_of_the_update(model):
    model.fit(X, Y, batch_size=4, verbose=0)
    text = program(model).short()
    assert "super().call(inputs)" in text or "ops.matmul(inputs, self.kernel)" in text
    assert "@tracedupdate" in text
    assert "%first.kernel by %first.kernel..grad" in text
    assert "%first.kernel..velocity" in str(program(model))


def test_a_learning_rate_that_is_assigned_acts_without_compiling(model):
    model.fit(X, Y, batch_size=4, verbose=0)
    known, before = len(ipu_dynamo.programs()), model.get_weights()
    model.optimizer.learning_rate = 0.0
    model.fit(X, Y, batch_size=4, verbose=0)
    assert len(ipu_dynamo.programs()) == known
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.inductor
def test_programs_work_in_the_memory_of_keras(model):
    addresses = [v.value.data_ptr() for v in model.variables]
    model.fit(X, Y, batch_size=4, verbose=0, validation_data=(X, Y))
    assert [v.value.data_ptr() for v in model.variables] == addresses
    expected = model.predict(X, batch_size=4, verbose=0)
    model.layers[0].kernel.assign(model.layers[0].kernel * 2.0)  # the host's, at the next call
    changed = model.predict(X, batch_size=4, verbose=0)
    with torch.no_grad():
        np.testing.assert_allclose(changed, model(X).numpy(), rtol=1e-5, atol=1e-6)
    assert not np.allclose(expected, changed)


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", [pytest.param("inductor", marks=pytest.mark.inductor), "eager"])
def test_states_of_the_optimizer_that_the_host_assigns_act(model, engine):
    twin = keras.models.clone_model(model)
    twin.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=4)
    twin.set_weights([weight + 0.1 for weight in model.get_weights()])
    twin.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    twin.set_weights(model.get_weights())
    for variable in twin.optimizer.variables:  # as new: the same update again
        variable.assign(keras.ops.zeros_like(variable))
    twin.optimizer.learning_rate = 0.01
    fresh = keras.models.clone_model(model)
    fresh.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=4)
    fresh.set_weights(model.get_weights())
    fresh.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    twin.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    for a, b in zip(twin.get_weights(), fresh.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    (run,) = state_of(twin).programs.values()
    assert bool(run.compiled.executable.fused) == (engine == "inductor")


def test_the_variable_lets_the_first_step_run_now(model, monkeypatch):
    monkeypatch.setenv(START, "now")
    engine = start_now.use(monkeypatch, HeldEngine())
    model.fit(X[:16], Y[:16], batch_size=4, verbose=0)
    assert engine.compiled == 0
    engine.let_go.set()
    model.fit(X[:16], Y[:16], batch_size=4, verbose=0)
    assert engine.compiled == 1
    (run,) = state_of(model).programs.values()
    assert run.compiled.executable.step == 8
    assert run.compiled.executable.fused


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.optimizer, "clipnorm", 0.001),
        lambda model: setattr(model.layers[0], "trainable", False),
        lambda model: model.compile(keras.optimizers.SGD(0.1), "mae", steps_per_execution=4),
    ],
    ids=["a constant of the optimizer", "a frozen layer", "compile"],
)
def test_what_is_part_of_the_program_compiles_again(model, change):
    model.fit(X, Y, batch_size=4, verbose=0)
    known, frozen = len(ipu_dynamo.programs()), model.layers[0].kernel.numpy()
    change(model)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert len(ipu_dynamo.programs()) == known + 1
    if not model.layers[0].trainable:
        assert np.array_equal(frozen, model.layers[0].kernel.numpy())


def test_a_layer_that_reads_a_value_is_named_with_its_line():
    class Reads(L.Layer):
        def call(self, x):
            return x if float(x[0, 0]) > 0 else -x

    with IPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), Reads(name="reader")])
        with pytest.raises(CompileError, match=r"layer reader \(Reads\)[\s\S]*float\(x\[0, 0\]\)"):
            model.predict(X, verbose=0)


class OwnSteps(keras.Sequential):
    """Steps as in Keras' guide."""

    def test_step(self, data):
        x, y = data
        return {"error": keras.ops.max(self(x) - y)}

    def predict_step(self, data):
        return self(data / 2, training=False)


def test_own_steps_get_what_keras_gives_them():
    x = np.random.default_rng(0).normal(size=(4, 2)).astype("float32")

    def run():
        keras.utils.set_random_seed(1)
        model = OwnSteps([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        logs = model.evaluate(x, x[:, :1], batch_size=4, verbose=0, return_dict=True)
        return logs["error"], model.predict(x, batch_size=2, verbose=0)

    expected = run()
    with IPUStrategy().scope():
        for mine, plain in zip(run(), expected, strict=True):
            np.testing.assert_allclose(mine, plain, rtol=1e-5)
