"""Check models inside pipelined models, whose layers are on several stages."""

from typing import Any

import keras
import numpy as np

from ipu_dynamo.keras import IPUStrategy

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 4)).astype("float32")
Y = RNG.standard_normal((12, 3)).astype("float32")
STAGES = {"a": 0, "b": 1, "c": 1, "in1": 0, "in2": 1, "add": 1, "d": 1}


def make() -> Any:
    """A model inside, beside a branch of layers on a later stage than its first ones."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    hidden = L.Dense(4, activation="tanh", kernel_regularizer="l2", name="in1")(inputs)
    inner = keras.Model(inputs, L.Dense(4, name="in2")(hidden), name="inner")
    x = keras.Input((4,))
    first = L.Dense(4, name="a")(x)
    beside = L.Dense(4, name="c")(L.Dense(4, activation="tanh", name="b")(first))
    both = L.Add(name="add")([inner(first), beside])
    model = keras.Model(x, L.Dense(3, name="d")(both))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def staged() -> Any:
    model = make()
    elements = model.get_pipeline_stage_assignment()
    for element in elements:
        inner = element.pipeline_stage_assignments if element.is_nested_model else [element]
        for one in inner:
            one.pipeline_stage = STAGES[one.layer.name]
    model.set_pipeline_stage_assignment(elements)
    model.set_pipelining_options(3, gradient_accumulation_reduction_method="mean")
    model.steps_per_execution = 6
    return model


def test_a_model_inside_runs_stage_by_stage_with_the_least_number_of_micro_batches():
    plain = make()
    plain.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    with IPUStrategy(num_ipus=2).scope():
        model = staged()
        model.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
        outputs = model.predict(X, batch_size=2, verbose=0)
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs, plain.predict(X, verbose=0), rtol=1e-4, atol=1e-5)
