"""Train and use unusual pipelined models as programs, and compare with plain Keras."""

import keras
import numpy as np
import pytest

from ipu_dynamo.keras import IPUStrategy
from tests.keras.stages.keras_graphs import D, fill

BATCH, ACCUMULATION = 4, 5

pytestmark = pytest.mark.filterwarnings("ignore:`build:UserWarning")


class Inner(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.a, self.b = D(5, activation="tanh"), D(3)

    def call(self, x):
        return self.b(self.a(x) * 1.5)


class Outer(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner, self.first, self.last = Inner(), D(3), D(1)

    def call(self, x):
        return self.last(self.inner(self.first(x)) + x)


class Sum(keras.layers.Layer):
    def call(self, inputs):
        return inputs["a"] + inputs["b"]


def with_a_subclass_inside():
    inputs = keras.Input((3,))
    hidden = D(3)(inputs)
    return keras.Model(inputs, D(1)(Inner()(hidden) + hidden))


def a_subclass():
    model = Outer()
    model.build((None, 3))
    return model


def with_a_shared_layer():
    inputs = keras.Input((3,))
    shared = D(3)
    return keras.Model(inputs, D(1)(shared(D(3, activation="relu")(shared(inputs)))))


def of_dictionaries():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    hidden, other = D(4)(a), D(4)(b)
    both = keras.layers.Concatenate()([hidden, other])
    return keras.Model({"a": a, "b": b}, {"p": D(1)(both), "q": D(1)(other)})


def a_chain_of_dictionaries():
    return keras.Sequential([Sum(), D(4), D(1)])


def with_masks():
    layers = [keras.layers.Embedding(7, 3, mask_zero=True), keras.layers.LSTM(4), D(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


CASES = {
    "a subclass in a functional": (with_a_subclass_inside, [0, 0, 1, 1], None),
    "a subclass in a subclass": (a_subclass, [0, 0, 1, 1], None),
    "a shared layer": (with_a_shared_layer, [0, 1, 2, 2], [0, 1, 0]),
    "dictionaries": (of_dictionaries, [0, 0, 1, 1, 1], None),
    "a chain of dictionaries": (a_chain_of_dictionaries, [0, 0, 1], None),
    "masks": (with_masks, [0, 1, 1], None),
}


def data(name):
    rng = np.random.default_rng(1)
    count = BATCH * ACCUMULATION * 2
    x, y = rng.random((count, 3), "float32"), rng.random((count, 1), "float32")
    if "dictionaries" in name:
        return {"a": x, "b": x[::-1].copy()}, {"p": y, "q": 2 * y} if name == "dictionaries" else y
    return (rng.integers(0, 7, (count, 3)).astype("int32") if name == "masks" else x), y


def results(model, x, y, batch_size, **options):
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    history = model.fit(x, y, batch_size=batch_size, epochs=2, verbose=0, shuffle=False)
    return (
        history.history["loss"],
        model.evaluate(x, y, batch_size=BATCH, verbose=0),
        keras.tree.flatten(model.predict(x, batch_size=BATCH, verbose=0)),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_a_pipelined_model_computes_what_plain_keras_does(name):
    make, stages, mapping = CASES[name]
    x, y = data(name)
    first = keras.tree.map_structure(lambda rows: rows[:1], x)
    plain = make()
    plain(first)
    with IPUStrategy(2).scope():
        model = make()
        model.set_pipeline_stage_assignment(fill(model.get_pipeline_stage_assignment(), stages))
        model.set_pipelining_options(
            ACCUMULATION, mapping, gradient_accumulation_reduction_method="mean"
        )
        model(first)
        model.set_weights(plain.get_weights())
        ours = results(model, x, y, BATCH, steps_per_execution=ACCUMULATION)
    expected = results(plain, x, y, BATCH * ACCUMULATION)
    for mine, theirs in zip(ours, expected, strict=True):
        for value, other in (
            zip(mine, theirs, strict=True) if isinstance(mine, list) else [(mine, theirs)]
        ):
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)
