"""Check which hooks are called with what, in both kinds of callbacks, and from which thread."""

import threading
import time

import keras
import numpy as np
import pytest

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.settings.enumerations import ReplicatedMetricReductionMethod
from tests.keras.loop.cases import Recorder, arrays, outside_scopes, small_model


def fit(model, rows=96, *, callbacks, validate=False, epochs=2, **kwargs):
    x, y = arrays(rows)
    return model.fit(
        x,
        y,
        batch_size=1,
        epochs=epochs,
        shuffle=False,
        callbacks=callbacks,
        validation_data=arrays(rows, seed=5) if validate else None,
        verbose=0,
        **kwargs,
    )


def same_logs(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine[:2] == plain[:2]
        assert mine[2].keys() == plain[2].keys()
        for name in mine[2]:
            np.testing.assert_allclose(mine[2][name], plain[2][name], rtol=1e-5, err_msg=name)


def test_hooks_are_those_of_plain_keras(machine):
    recorder = Recorder()
    history = fit(small_model(), 12, callbacks=[recorder], validate=True, initial_epoch=1)
    plain = Recorder()
    with outside_scopes():
        theirs = fit(small_model(), 12, callbacks=[plain], validate=True, initial_epoch=1)
    same_logs(recorder.calls, plain.calls)
    assert history.epoch == theirs.epoch
    assert history.history.keys() == theirs.history.keys()
    assert recorder.params == plain.params


@pytest.mark.parametrize(("replicas", "pairs"), [(1, 6), (2, 3)])
def test_a_pair_of_hooks_for_each_execution(machine, replicas, pairs):
    machine.replicas = replicas
    recorder = Recorder()
    fit(small_model(16), callbacks=[recorder], validate=True)
    begins = [16 * n for n in range(pairs)]
    assert recorder.numbers("on_train_batch_begin") == begins * 2
    assert recorder.numbers("on_train_batch_end") == [b + 15 for b in begins] * 2
    assert recorder.numbers("on_test_batch_end") == [b + 15 for b in begins] * 2
    assert recorder.params["steps"] == 96 // replicas
    assert all(logs.keys() == {"loss", "mae"} for logs in recorder.logs("on_train_batch_end"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_predict_gives_the_rows_of_an_execution_in_order(machine, replicas):
    machine.replicas = replicas
    model, (x, _), recorder = small_model(4), arrays(48), Recorder()
    outputs = model.predict(x, batch_size=2, callbacks=[recorder], verbose=0)
    with outside_scopes():
        model.steps_per_execution, model.predict_function = 1, None
        np.testing.assert_allclose(outputs, model.predict(x, batch_size=2, verbose=0), rtol=1e-6)
    rows = 8 * replicas
    for index, logs in enumerate(recorder.logs("on_predict_batch_end")):
        np.testing.assert_array_equal(logs["outputs"], outputs[index * rows : (index + 1) * rows])
    assert recorder.numbers("on_predict_batch_end") == list(range(3, 24 // replicas, 4))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("replicas", "method"), [(1, "none"), (2, "none"), (2, "list"), (2, "sum")]
)
def test_asynchronous_hooks_come_for_each_step_of_each_replica(machine, replicas, method):
    machine.replicas = replicas
    model, recorder = small_model(8), Recorder()
    model.set_asynchronous_callbacks(True)
    state_of(model).change(metric_reduction=ReplicatedMetricReductionMethod.parse(method, ""))
    fit(model, callbacks=[recorder], validate=True)
    steps = [step for step in range(96 // replicas) for _ in range(replicas)]
    assert recorder.numbers("on_train_batch_begin") == steps * 2
    assert recorder.numbers("on_train_batch_end") == steps * 2
    assert recorder.numbers("on_test_batch_end") == steps * 2
    assert threading.main_thread() not in recorder.threads
    logs = recorder.logs("on_train_batch_end")
    epochs = recorder.logs("on_epoch_end")
    if method == "none":
        assert all(isinstance(log["loss"], float) for log in logs)
        assert len({log["loss"] for log in logs}) > len(steps)
    if method == "list":
        assert logs[0]["loss"] == logs[1]["loss"]
        assert len(logs[0]["loss"]) == replicas
    assert epochs[-1]["loss"] == logs[-1]["loss"]
    order = recorder.names()
    assert order.index("on_epoch_end") > 2 * 96  # behind all hooks of the first epoch


def test_the_first_asynchronous_hook_comes_while_the_last_step_is_held_back(machine):
    came = threading.Event()

    def hold_back(step):
        if step == 7:
            assert came.wait(20)

    machine.before_step = hold_back
    model = small_model(8)
    model.set_asynchronous_callbacks(True)
    first = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: came.set())
    fit(model, 8, callbacks=[first], epochs=1)
    assert came.is_set()


@pytest.mark.parametrize(("asynchronous", "calls"), [(False, 2), (True, 3)])
def test_stop_training_ends_behind_the_current_call(machine, asynchronous, calls):
    model, third_call, stopped = small_model(4), threading.Event(), threading.Event()
    model.set_asynchronous_callbacks(asynchronous)

    def stop(batch, logs):
        if batch == 7:
            assert not asynchronous or third_call.wait(20)
            model.stop_training = True
            stopped.set()

    def in_third_call(step):
        if len(machine.shapes) == 3:
            third_call.set()
            assert stopped.wait(20)

    machine.before_step = in_third_call
    before = threading.enumerate()
    stopping = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    history = fit(model, 40, callbacks=[stopping], epochs=3)
    assert history.epoch == [0]
    assert len(machine.shapes) == calls
    assert threading.enumerate() == before


def test_asynchronous_hooks_are_off_where_results_are_accumulated(machine):
    machine.pipelined = True
    model = small_model(4)
    state = state_of(model)
    state.change(asynchronous_callbacks=True, accumulate_outfeed=True)
    recorder = Recorder()
    fit(model, 8, callbacks=[recorder], epochs=1)
    model.predict(arrays(8)[0], batch_size=1, callbacks=[recorder], verbose=0)
    assert recorder.numbers("on_train_batch_end") == [3, 7]
    assert recorder.numbers("on_predict_batch_end") == list(range(8))


def test_async_safe_callbacks_keep_the_order_of_steps(machine):
    class Slow(keras.callbacks.Callback):
        async_safe = True

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.002 if batch % 2 else 0)
            seen.append(batch)

    seen: list[int] = []
    model = small_model(4)
    model.set_asynchronous_callbacks(True)
    fit(model, 24, callbacks=[Slow()], epochs=1)
    assert seen == list(range(24))


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "train_on_batch"])
def test_an_asynchronous_callback_does_not_execute_its_model(machine, method):
    model, other, (x, y) = small_model(4), small_model(), arrays(8)

    def execute(batch, logs):
        other.predict(x, verbose=0)
        getattr(model, method)(x)

    model.set_asynchronous_callbacks(True)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=execute)
    with pytest.raises(RuntimeError, match=rf"{method} of model .* asynchronous callback"):
        fit(model, 8, callbacks=[callback], epochs=1)
    model.set_asynchronous_callbacks(False)
    in_epochs = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.predict(x, batch_size=1, verbose=0),
        on_train_batch_end=lambda batch, logs: model.evaluate(x, y, batch_size=1, verbose=0),
    )
    fit(model, 8, callbacks=[in_epochs], epochs=1)
