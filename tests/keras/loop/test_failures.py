"""Check that exceptions reach the caller, whoever raises them, and that nothing is left behind."""

import random
import threading
import time
from contextlib import contextmanager

import keras
import numpy as np
import pytest
import torch

from ipu_dynamo.keras import IPUStrategy
from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.calls.programs import _OptimizerStates
from tests.keras.loop.cases import arrays, outside_scopes, small_model
from tests.keras.loop.test_data import Batches

ROUNDS = 5
BATCHES, STEPS = 12, 4


class Planned(Exception):
    """What a test raises on purpose."""


class Breaking(Batches):
    """A dataset that raises at one batch."""

    def __init__(self, at, **kwargs):
        super().__init__(BATCHES, **kwargs)
        self.at = at

    def __getitem__(self, index):
        if index == self.at:
            raise Planned(f"batch {index}")
        return super().__getitem__(index)


class BreakingCallback(keras.callbacks.Callback):
    def __init__(self, at, hook):
        super().__init__()
        setattr(self, hook, self._raise)
        self.at = at

    def _raise(self, batch, logs=None):
        if batch >= self.at:
            raise Planned(f"callback at {batch}")


def fails(model, x, y=None, **kwargs):
    """Fit, and see the planned exception soon and nothing left running."""
    before, begin = threading.enumerate(), time.monotonic()
    with pytest.raises(Planned):
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, **kwargs)
    assert time.monotonic() - begin < 5
    assert_threads(before)


def assert_threads(before):
    """No thread is left; the pool of a dataset's workers is told to end, and takes a moment."""
    deadline = time.monotonic() + 2
    while threading.enumerate() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.enumerate() == before


def weights_after(batches):
    """Weights of plain Keras after so many batches."""
    with outside_scopes():
        plain = small_model()
        if batches:
            x, y = arrays(4 * BATCHES)
            rows = 4 * batches
            plain.fit(x[:rows], y[:rows], batch_size=4, shuffle=False, verbose=0)
        return plain.get_weights()


def assert_weights(model, batches):
    for ours, theirs in zip(model.get_weights(), weights_after(batches), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def fits_again(model):
    x, y = arrays(4 * BATCHES)
    history = model.fit(x, y, batch_size=4, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_of_a_source_is_raised_at_its_batch(machine, asynchronous, workers):
    for at in range(0, BATCHES, 5):
        model = small_model(STEPS)
        model.set_asynchronous_callbacks(asynchronous)
        fails(model, Breaking(at, workers=workers))
        executions = len(machine.shapes)
        # workers are ahead, and Keras raises what they met when it begins the epoch
        assert executions == at // STEPS or (workers > 1 and executions < at // STEPS)
        assert_weights(model, executions * STEPS)
        fits_again(model)
        machine.shapes.clear()


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_of_a_callback_is_raised_behind_its_execution(machine, asynchronous, hook):
    for at in (0, 3, 8):
        x, y = arrays(4 * BATCHES)
        model = small_model(STEPS)
        model.set_asynchronous_callbacks(asynchronous)
        fails(model, x, y, callbacks=[BreakingCallback(at, hook)])
        fits_again(model)


def test_no_execution_begins_after_an_asynchronous_callback_has_raised(machine):
    raised = threading.Event()

    class Raises(BreakingCallback):
        def _raise(self, batch, logs=None):
            raised.set()
            super()._raise(batch, logs)

    def wait_in_second(step):
        if len(machine.shapes) == 2 and step == 3:
            assert raised.wait(20)
            time.sleep(0.1)  # until the thread has noted what the callback raised

    machine.before_step = wait_in_second  # unless the first execution's end sees it already
    x, y = arrays(16 * STEPS)
    model = small_model(STEPS)
    model.set_asynchronous_callbacks(True)
    fails(model, x, y, callbacks=[Raises(0, "on_train_batch_end")])
    assert len(machine.shapes) <= 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_of_the_program_is_raised(machine, asynchronous):
    def fail(step):
        if step == 2 and len(machine.shapes) == 2:
            raise Planned("step")

    x, y = arrays(4 * BATCHES)
    model = small_model(STEPS)
    model.set_asynchronous_callbacks(asynchronous)
    machine.before_step = fail
    fails(model, x, y)
    machine.before_step = lambda step: None
    fits_again(model)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_evaluate_and_predict_end_their_threads_too(machine, method, asynchronous):
    model = small_model(STEPS)
    model.set_asynchronous_callbacks(asynchronous)
    before = threading.enumerate()
    hook = {"evaluate": "on_test_batch_end", "predict": "on_predict_batch_end"}[method]
    with pytest.raises(Planned):
        getattr(model, method)(Batches(), callbacks=[BreakingCallback(5, hook)], verbose=0)
    with pytest.raises(Planned):
        getattr(model, method)(Breaking(7), verbose=0)
    assert threading.enumerate() == before
    getattr(model, method)(Batches(), verbose=0)
    assert threading.enumerate() == before


def test_validation_that_fails_ends_fit(machine):
    model = small_model(STEPS)
    x, y = arrays(4 * BATCHES)
    fails(model, x, y, validation_data=Breaking(6))
    assert_weights(model, BATCHES)
    fits_again(model)


def test_an_exception_in_the_pool_of_keras_ends_it(machine):
    class Safe(BreakingCallback):
        async_safe = True  # Keras calls it in a pool

    x, y = arrays(4 * BATCHES)
    fails(small_model(STEPS), x, y, callbacks=[Safe(5, "on_train_batch_end")])


def test_stopping_ends_the_workers_of_a_dataset(machine):
    model, before = small_model(STEPS), threading.enumerate()
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", True)
    )
    model.fit(Batches(workers=2), epochs=2, callbacks=[stop], verbose=0)
    assert_threads(before)


@keras.saving.register_keras_serializable("tests")
class BreakingLayer(keras.layers.Layer):
    """A layer whose Python raises while it is armed."""

    armed = False

    def call(self, inputs):
        if self.armed:
            raise Planned("layer")
        return inputs


def machine_model(*, pipelined):
    keras.utils.set_random_seed(1)
    layer = BreakingLayer()
    dense = keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((3,)), dense, layer, keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=STEPS)
    if pipelined:
        model.set_pipeline_stage_assignment([0, 1, 1])
        model.set_pipelining_options(STEPS)
    return model, layer


def break_rounds(rounds, seed=0, *, pipelined=False):
    """Rounds of an exception at a random batch, in source, callback and layer, on real programs.

    Returns:
        The longest time from the call to the exception, in seconds.
    """
    rng, longest = random.Random(seed), 0.0
    x, y = arrays(4 * BATCHES)
    with IPUStrategy(2 if pipelined else 1).scope():
        model, layer = machine_model(pipelined=pipelined)
        model.fit(x, y, batch_size=4, verbose=0)
        for number in range(rounds):
            where = ("source", "callback", "layer")[number % 3]
            at = rng.randrange(BATCHES)
            if rng.random() < 0.5:
                model.set_asynchronous_callbacks(rng.random() < 0.5)  # compiles again
            before, begin = threading.enumerate(), time.monotonic()
            data, kwargs = Batches(BATCHES), {}
            if where == "source":
                data = Breaking(at, workers=rng.choice([1, 2]))
            elif where == "callback":
                hook = rng.choice(["on_train_batch_begin", "on_train_batch_end"])
                kwargs["callbacks"] = [BreakingCallback(min(at, BATCHES - STEPS), hook)]
            else:
                layer.armed = True
                state_of(model).programs.clear()  # as a setter does; the layer is traced anew
            with pytest.raises(Planned):
                model.fit(data, epochs=2, verbose=0, **kwargs)
            longest = max(longest, time.monotonic() - begin)
            assert_threads(before)
            layer.armed = False
            fits_again(model)
    return longest


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("pipelined", [False, True])
def test_rounds_of_failures_on_the_machine(pipelined):
    break_rounds(ROUNDS, pipelined=pipelined)


def trained_weights(interrupt=None):
    """Weights after two calls of fit; `interrupt` is in force during the first one."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.05), "mse", steps_per_execution=STEPS)
    x, y = arrays(4 * BATCHES)

    def fit():
        model.fit(x[: 4 * STEPS], y[: 4 * STEPS], batch_size=4, shuffle=False, verbose=0)

    if interrupt is None:
        fit()
    else:
        with interrupt(), pytest.raises(KeyboardInterrupt):
            fit()
    fit()
    return model.get_weights()


def test_states_are_right_after_an_interrupt_while_they_come_back(monkeypatch):
    """Some of Keras' variables have new values then, and others do not."""

    @contextmanager
    def interrupt():
        def read(states, names):
            kept = {name: tensor.clone() for name, tensor in states.weights().items()}
            read_all(states, names)
            for name in list(kept)[1:]:
                with torch.no_grad():
                    states.weights()[name].copy_(kept[name])
            raise KeyboardInterrupt

        read_all = _OptimizerStates.read_weights
        with monkeypatch.context() as patch:
            patch.setattr(_OptimizerStates, "read_weights", read)
            yield

    with IPUStrategy().scope():
        for ours, expected in zip(trained_weights(interrupt), trained_weights(), strict=True):
            np.testing.assert_array_equal(ours, expected)
