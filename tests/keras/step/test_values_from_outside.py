"""Check that values which callbacks change act as in plain Keras, wherever a step reads them."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch

from ipu_dynamo.errors import CompileError
from ipu_dynamo.keras import IPUStrategy

L, ops = keras.layers, keras.ops
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Schedule = keras.optimizers.schedules.LearningRateSchedule
Read = Callable[[], Any]
Place = Callable[[Read], dict[str, Any]]


class Scaled(Schedule):
    """A schedule without `get_config`."""

    def __init__(self, read: Read) -> None:
        self.read, self.factor = read, 1.0

    def __call__(self, step: Any) -> Any:
        return 0.02 * self.read() * self.factor


class Clip(keras.constraints.Constraint):
    def __init__(self, read: Read) -> None:
        self.read = read

    def __call__(self, w: Any) -> Any:
        return ops.clip(w, -0.2, 0.2) * (1 + self.read() * 0.01)


class OwnSGD(keras.optimizers.SGD):
    read: Read

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.read(), variable, learning_rate)


def loss(read: Read) -> dict[str, Any]:
    return {"loss": lambda t, p: read() * ops.mean(ops.square(t - p), axis=-1)}


def regularizer(read: Read) -> dict[str, Any]:
    return {"layer": L.Dense(1, kernel_regularizer=lambda w: read() * ops.sum(ops.square(w)))}


def activation(read: Read) -> dict[str, Any]:
    return {"layer": L.Dense(1, activation=lambda x: x * read())}


def schedule(read: Read) -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(Scaled(read))}


def constraint(read: Read) -> dict[str, Any]:
    return {"layer": L.Dense(1, kernel_constraint=Clip(read))}


def optimizer(read: Read) -> dict[str, Any]:
    own = OwnSGD(0.05)
    own.read = read
    return {"optimizer": own}


PLACES = [loss, regularizer, activation, schedule, constraint, optimizer]


class Box:
    """A number that a callback changes in Python."""

    def __init__(self) -> None:
        self.value = 0.5


def variable() -> tuple[Read, Any]:
    held = keras.Variable(0.5, trainable=False, name="own_factor")
    return lambda: held, lambda new: held.assign(new)


def tensor() -> tuple[Read, Any]:
    held = torch.tensor(0.5)
    return lambda: held, held.fill_


def tensor_of_one() -> tuple[Read, Any]:
    held = torch.full((1,), 0.5)
    return lambda: held[0], held.fill_


def array() -> tuple[Read, Any]:
    held = np.full((1,), 0.5, "float32")
    return lambda: ops.convert_to_tensor(held)[0], held.fill


def number() -> tuple[Read, Any]:
    box = Box()
    return lambda: box.value, lambda new: setattr(box, "value", new)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def losses(layer: Any = None, loss: Any = "mse", optimizer: Any = None, **fit: Any) -> Any:
    """The losses of the epochs of one training."""
    model = keras.Sequential([keras.Input((3,)), layer or L.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.05), loss)
    settings = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, **fit}
    return model.fit(X, X[:, :1], **settings).history["loss"]


def annealed(place: Place, value: Callable[[], tuple[Read, Any]]) -> Any:
    keras.utils.set_random_seed(1)
    read, change = value()

    def begin(epoch: int, logs: Any = None) -> None:
        change(0.5 + epoch)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*becomes a constant")
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=begin)]
        return losses(**place(read), callbacks=callbacks)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (loss, variable),
        (schedule, variable),
        (loss, tensor),
        *(slow(place, variable) for place in PLACES if place not in (loss, schedule)),
        *(slow(loss, value) for value in (tensor_of_one, array, number)),
        *(slow(place, number) for place in (schedule, constraint, optimizer)),
        slow(schedule, array),
    ],
)
def test_a_value_that_a_callback_changes_acts(place, value):
    expected = annealed(place, value)
    with IPUStrategy().scope():
        np.testing.assert_allclose(annealed(place, value), expected, rtol=1e-5)


def test_an_update_that_reads_a_tensor_is_refused():
    with IPUStrategy().scope(), pytest.raises(CompileError, match=r"reads a tensor of shape \[\]"):
        annealed(schedule, tensor)


def attribute_of(owner: Any, name: str) -> Any:
    return keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(owner, name, 0.5 / (epoch + 1))
    )


class OwnLoss(keras.losses.Loss):
    weight = 1.0

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.weight * ops.mean(ops.square(y_true - y_pred), axis=-1)


class OwnLayer(L.Dense):
    def __init__(self) -> None:
        super().__init__(1)
        self.beta = 1.0

    def call(self, x: Any) -> Any:
        return super().call(x) * self.beta


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("schedule", "factor"),
        slow("loss", "weight"),
        slow("layer", "beta"),
        slow("optimizer", "momentum"),
    ],
)
def test_an_attribute_that_no_config_has_acts(what, name):
    def run() -> Any:
        keras.utils.set_random_seed(1)
        made: dict[str, Any] = {
            "schedule": lambda: Scaled(lambda: 1.0),
            "loss": OwnLoss,
            "layer": OwnLayer,
            "optimizer": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        }
        owner = made[what]()
        used = {"optimizer": keras.optimizers.SGD(owner)} if what == "schedule" else {what: owner}
        return losses(**used, callbacks=[attribute_of(owner, name)])

    expected = run()
    with IPUStrategy().scope():
        np.testing.assert_allclose(run(), expected, rtol=1e-5)


class Counting(L.Layer):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x * self.calls


def test_what_a_step_changes_in_python_is_named(caplog):
    layer = Counting()
    with IPUStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), L.Dense(1), layer], name="counts")
        model.compile("sgd", "mse")
        with caplog.at_level("WARNING", "ipu_dynamo.keras"):
            model.fit(X, X[:, :1], batch_size=2, verbose=0)
    (text,) = [one.message for one in caplog.records]
    assert f"changes layer {layer.name}.calls in Python" in text


class Counts(Schedule):
    def __init__(self) -> None:
        self.count = keras.Variable(1.0, trainable=False, name="own_count")

    def __call__(self, step: Any) -> Any:
        self.count.assign(self.count + 1)
        return 0.1 / self.count


def test_a_schedule_that_assigns_a_variable_of_its_own_is_refused():
    with (
        IPUStrategy().scope(),
        pytest.raises(CompileError, match=r"the update assigns own_count.*\n.*add_variable"),
    ):
        losses(optimizer=keras.optimizers.SGD(Counts()))


def test_an_update_that_reads_what_its_step_assigns_is_refused():
    def activation(x: Any) -> Any:
        held.assign(held + 0.1)
        return x * held

    with IPUStrategy().scope():
        held = keras.Variable(1.0, trainable=False, name="own_state")
        optimizer = keras.optimizers.SGD(Scaled(lambda: held))
        with pytest.raises(CompileError, match="reads own_state, which the step assigns"):
            losses(L.Dense(1, activation=activation), optimizer=optimizer)


@pytest.mark.parametrize("cls", [L.SimpleRNN, slow(L.GRU), slow(L.LSTM)])
def test_recurrent_layers_keep_their_states(cls):
    x = np.random.default_rng(0).normal(size=(8, 3, 2)).astype("float32")

    def run() -> list[Any]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input(batch_shape=(4, 3, 2)), cls(3, stateful=True), L.Dense(1)]
        )
        model.compile("sgd", "mse")
        first = model.predict(x, batch_size=4, verbose=0)
        if cls is L.SimpleRNN:  # plain Keras fails to train the others
            model.fit(x, x[:, 0, :1], batch_size=4, shuffle=False, verbose=0)
        states = [np.array(state) for state in model.layers[0].states]
        model.layers[0].reset_state()
        return [first, *states, model.predict(x, batch_size=4, verbose=0)]

    expected = run()
    with IPUStrategy().scope():
        for mine, plain in zip(run(), expected, strict=True):
            np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-5)
