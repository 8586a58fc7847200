"""Check `keras.ops.cond` in a program: what it selects, and what it refuses."""

from typing import Any

import keras
import numpy as np
import pytest
import torch

from ipu_dynamo.errors import CompileError
from ipu_dynamo.keras import IPUStrategy

L, ops = keras.layers, keras.ops
ROWS = np.array([[1.0, 2.0], [-3.0, 1.0], [0.5, -0.25], [-1.0, -1.0]], "float32")


def outputs(call: Any, **attributes: Any) -> np.ndarray:
    """What a layer with this `call` gives for each row alone, by a program."""

    class Layer(L.Layer):
        def __init__(self) -> None:
            super().__init__(name="layer")
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            return call(self, x)

    with IPUStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), Layer()])
        model.compile(steps_per_execution=4)
        result = model.predict(ROWS, batch_size=1, verbose=0)
    return np.concatenate([result, np.full((4, 1), float(model.layers[0].count.value))], 1)


def test_the_branch_that_is_taken_is_returned_and_assigned():
    def call(layer, x):
        def positive():
            layer.count.assign_add(1.0)
            return {"y": x * 2.0, "none": None}

        def negative():
            layer.count.assign_add(10.0)
            return {"y": -x, "none": None}

        return ops.cond(ops.sum(x) > 0, positive, negative)["y"]

    result = outputs(call)
    expected = np.where(ROWS.sum(1, keepdims=True) > 0, ROWS * 2, -ROWS)
    np.testing.assert_array_equal(result[:, :2], expected)
    assert result[0, 2] == 22.0


def test_a_branch_reads_what_was_assigned_before_and_not_what_the_other_assigns():
    def call(layer, x):
        layer.count.assign(5.0)

        def one():
            layer.count.assign(layer.count + 1.0)
            return layer.count * 1.0

        def other():
            return layer.count * 100.0

        return x + ops.cond(x[0, 0] > 0, one, other)

    result = outputs(call)
    np.testing.assert_array_equal(result[:, :2] - ROWS, [[6] * 2, [500] * 2, [6] * 2, [500] * 2])
    assert result[0, 2] == 5.0  # of the last row


def test_nested_conditions_select():
    def call(layer, x):
        return ops.cond(
            x[0, 0] > 0,
            lambda: ops.cond(x[0, 1] > 0, lambda: x, lambda: x * 10.0),
            lambda: x * 100.0,
        )

    np.testing.assert_array_equal(outputs(call)[:, :2], ROWS * [[1], [100], [10], [100]])


def test_a_bool_and_a_constant_take_one_branch():
    ran = []

    def call(layer, x):
        for predicate in (True, ops.equal(ops.convert_to_tensor(1.5), 1.0)):
            ops.cond(predicate, lambda: ran.append("true"), lambda: ran.append("false"))
        return x

    outputs(call)
    assert ran[-2:] == ["true", "false"]
    assert len(ran) == 2 * (len(ran) // 2)


def test_a_write_in_place_to_an_outer_tensor_is_refused():
    def call(layer, x):
        y = x * 1.0

        def one():
            y.sub_(1.0)
            return y

        return ops.cond(x[0, 0] > 0, one, lambda: y)

    with pytest.raises(CompileError, match="writes in place"):
        outputs(call)


def test_a_write_to_a_view_of_an_outer_tensor_is_refused_and_to_an_own_one_is_not():
    def through_view(layer, x):
        y = x * 1.0

        def one():
            view = y[:, 0]
            view += 1.0
            return y

        return ops.cond(x[0, 0] > 0, one, lambda: y)

    with pytest.raises(CompileError, match="writes in place"):
        outputs(through_view)

    def own(layer, x):
        def one():
            y = x * 1.0
            y += 1.0
            return y

        return ops.cond(x[0, 0] > 0, one, lambda: x)

    np.testing.assert_array_equal(outputs(own)[0, :2], ROWS[0] + 1)


@pytest.mark.parametrize(
    "other",
    [lambda x: (x, x), lambda x: x[:, :1], lambda x: ops.cast(x, "float16"), lambda x: None],
)
def test_branches_of_another_kind_are_keras_own_error(other):
    def call(layer, x):
        return ops.cond(x[0, 0] > 0, lambda: x, lambda: other(x))

    with pytest.raises(ValueError, match="should return outputs of the same kind"):
        outputs(call)


def test_a_loss_in_a_branch_is_refused():
    def call(layer, x):
        def one():
            layer.add_loss(ops.sum(x))
            return x

        return ops.cond(x[0, 0] > 0, one, lambda: x)

    with pytest.raises(CompileError, match="adds a loss"):
        outputs(call)


def test_conditions_outside_of_tracing_stay_python():
    ran = []
    ops.cond(torch.tensor(True), lambda: ran.append(1), lambda: ran.append(2))
    assert ran == [1]


def test_a_gradient_is_that_of_the_branch_taken():
    class Layer(L.Dense):
        def call(self, x, training=None):
            y = super().call(x)
            return ops.cond(ops.sum(x) > 0, lambda: y * 3.0, lambda: -y)

    y = np.zeros((4, 2), "float32")

    def make(steps):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), Layer(2)])
        model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=steps)
        return model

    plain = make(1)
    with IPUStrategy().scope():
        model = make(4)
        model.fit(ROWS, y, batch_size=1, shuffle=False, verbose=0)
    plain.fit(ROWS, y, batch_size=1, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge", "binary_crossentropy"])
def test_losses_that_decide_by_labels_are_those_of_plain_keras(loss):
    y = np.array([[1.0], [-1.0], [1.0], [-1.0]], "float32")
    if loss == "binary_crossentropy":
        y = (y > 0).astype("float32")

    def make(steps):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), L.Dense(1, activation="sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), loss, steps_per_execution=steps)
        return model

    plain = make(1)
    with IPUStrategy().scope():
        model = make(2)
        model.fit(ROWS, y, batch_size=2, shuffle=False, verbose=0)
    plain.fit(ROWS, y, batch_size=2, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
