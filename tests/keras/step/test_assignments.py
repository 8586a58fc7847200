"""Check what layers assign while they run: as in plain Keras, or refused."""

from typing import Any

import keras
import numpy as np
import pytest

from ipu_dynamo.errors import CompileError
from ipu_dynamo.keras import IPUStrategy

L, ops = keras.layers, keras.ops
X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = X[:, :2]


class Average(L.Layer):
    """Add a moving average of the inputs, which holds the present ones, too."""

    def __init__(self, *, conditional: bool) -> None:
        super().__init__()
        self.conditional = conditional

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        def moved() -> Any:
            self.mean.assign(self.mean * 0.5 + ops.mean(x, axis=0))
            return x + self.mean

        return ops.cond(ops.sum(x) > 0, moved, lambda: x * 1.0) if self.conditional else moved()


@pytest.mark.parametrize("conditional", [False, True])
def test_no_gradient_goes_through_an_assignment(conditional: bool) -> None:
    def trained(**options: Any) -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4,)), L.Dense(3), Average(conditional=conditional), L.Dense(2)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.1), "mse", **options)
        model.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
        return model.get_weights()

    expected = trained()
    with IPUStrategy().scope():
        actual = trained(steps_per_execution=3)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_that_assigns_a_trainable_weight_is_refused() -> None:
    with IPUStrategy().scope():
        layer = L.SpectralNormalization(L.Dense(2, name="inner"))
        model = keras.Sequential([keras.Input((4,)), layer])
        model.compile("sgd", "mse", steps_per_execution=3)
        before = model.get_weights()
        with pytest.raises(CompileError, match=r"inner/kernel.*trainable"):
            model.fit(X, Y, batch_size=2, verbose=0)
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)
        assert model.predict(X, batch_size=2, verbose=0).shape == (12, 2)
