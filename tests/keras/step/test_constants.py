"""Check that numbers which Keras' objects hold as tensors are constants, without a warning."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest

from ipu_dynamo.keras import IPUStrategy

L, ops = keras.layers, keras.ops
X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")


class Counts(L.Layer):
    """Adds how often it was called, times a factor of its own."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.factor = ops.ones(shape) * 2.0

    def call(self, x: Any) -> Any:
        self.count.assign_add(1.0)
        return x * self.factor + self.count


def trained(shape: tuple[int, ...], **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    dense = L.Dense(2, kernel_regularizer="l1", bias_regularizer=keras.regularizers.L1L2(0.1, 0.2))
    model = keras.Sequential([keras.Input((4,)), dense, Counts(shape)])
    model.compile("sgd", "mse", **options)
    model.fit(X, X[:, :2], batch_size=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("shape", [(), (2,)])
def test_only_a_tensor_with_dimensions_is_news(shape):
    expected = trained(shape)
    with warnings.catch_warnings(record=True) as seen, IPUStrategy().scope():
        warnings.simplefilter("always")
        actual = trained(shape, steps_per_execution=3)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    told = [str(one.message) for one in seen if "becomes a constant" in str(one.message)]
    assert len(told) == len(shape), told
