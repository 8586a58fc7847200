"""Check whole calls on real programs: equal to plain Keras, and callbacks while they run."""

import threading

import keras
import numpy as np
import pytest
import torch
from torch import Tensor

import ipu_dynamo
from ipu_dynamo.errors import ExecutionError
from ipu_dynamo.keras import IPUStrategy, PipelineStage
from ipu_dynamo.keras.attach.model_state import state_of
from tests.keras.loop.cases import Recorder, arrays

MARK = 77.0
_AT_MARK = {"do": lambda: None}


@torch.library.custom_op("ipu_keras_tests::at_mark", mutates_args=())
def at_mark(x: Tensor) -> Tensor:
    """The input; where it holds the mark, the test does something first, within the program."""
    if bool((x == MARK).any()):
        _AT_MARK["do"]()
    return x.clone()


@at_mark.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


at_mark.register_autograd(lambda ctx, grad: grad)


class AtMark(keras.layers.Layer):
    """Call the test's function when a batch with the mark is computed, not when it is traced."""

    def call(self, inputs):
        return at_mark(inputs)

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.fixture(autouse=True)
def _nothing_at_marks(monkeypatch):
    monkeypatch.setitem(_AT_MARK, "do", lambda: None)


def marked_model(steps):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), AtMark(), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"], steps_per_execution=steps)
    return model


def marked(batches, at, rows=2):
    x, y = arrays(batches * rows)
    x[at * rows, 0] = MARK
    return x, y


@pytest.mark.few(4)
@pytest.mark.parametrize(("replicas", "pipelined"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_the_last_batch_waits_for_the_first_asynchronous_callback(method, replicas, pipelined):
    came = threading.Event()
    kind = {"fit": "train", "evaluate": "test", "predict": "predict"}[method]
    first = keras.callbacks.Callback()
    setattr(first, f"on_{kind}_batch_end", lambda batch, logs=None: came.set())
    x, y = marked(8, at=7)
    with IPUStrategy(2 if pipelined else replicas).scope():
        model = marked_model(8 // replicas)
        if pipelined:
            model.set_pipeline_stage_assignment([0, 1])
            model.set_pipelining_options(4)
        model.set_asynchronous_callbacks(True)
        waited = []
        _AT_MARK["do"] = lambda: waited.append(came.wait(20))
        data = {"x": x} if method == "predict" else {"x": x, "y": y}
        extra = {"shuffle": False} if method == "fit" else {}
        getattr(model, method)(**data, **extra, batch_size=2, callbacks=[first], verbose=0)
    assert waited == [True]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_within_a_program_leaves_the_last_complete_update(asynchronous):
    x, y = marked(12, at=6)
    before = threading.enumerate()

    def fail():
        raise ArithmeticError("in the program")

    with IPUStrategy().scope():
        model = marked_model(4)
        model.set_asynchronous_callbacks(asynchronous)
        _AT_MARK["do"] = fail
        recorder = Recorder()
        with pytest.raises(ExecutionError, match="ArithmeticError: in the program"):
            model.fit(x, y, batch_size=2, shuffle=False, callbacks=[recorder], verbose=0)
        assert threading.enumerate() == before
        ours = model.get_weights()
        _AT_MARK["do"] = lambda: None
        history = model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
        assert np.isfinite(history.history["loss"]).all()
    plain = marked_model(1)
    plain.fit(x[:12], y[:12], batch_size=2, shuffle=False, verbose=0)
    for mine, theirs in zip(ours, plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    steps = recorder.numbers("on_train_batch_end")
    assert steps == (list(range(len(steps))) if asynchronous else [3])


class InStages(keras.Model):
    """A subclass that enters stages in `call`: nothing knows of them before it is traced."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(4), keras.layers.Dense(2)

    def call(self, x):
        with PipelineStage(0):
            h = self.first(x)
        with PipelineStage(1):
            return self.last(h)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_stages_of_an_unbuilt_subclass_are_met_before_steps_are_planned(method):
    x, y = arrays(16)
    with IPUStrategy(2).scope():
        model = InStages()
        model.compile("sgd", "mse", steps_per_execution=4)
        model.set_pipelining_options(4)
        data = {"x": x} if method == "predict" else {"x": x, "y": y}
        getattr(model, method)(**data, batch_size=2, verbose=0)
        program = ipu_dynamo.programs()[-1]
        assert (program.num_stages, program.num_ipus) == (2, 2)
        model.steps_per_execution = 1
        with pytest.raises(ValueError, match=r"at least|multiple"):
            model.predict(x, batch_size=2, verbose=0)


def test_a_program_that_is_traced_within_an_epoch_computes_its_metrics():
    x, y = arrays(12)
    recorder = Recorder()
    with IPUStrategy().scope():
        model = marked_model(2)
        anew = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: state_of(model).programs.clear()
        )
        model.fit(x, y, batch_size=2, shuffle=False, callbacks=[anew, recorder], verbose=0)
    plain, theirs = marked_model(1), Recorder()
    plain.fit(x, y, batch_size=2, shuffle=False, callbacks=[theirs], verbose=0)
    losses = [logs["loss"] for logs in recorder.logs("on_train_batch_end")]
    expected = [logs["loss"] for logs in theirs.logs("on_train_batch_end")]
    assert losses == pytest.approx(expected[1::2], rel=1e-5)
