"""Check that a draw depends on its seed generator's state, the replica and the element alone."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest

from ipu_dynamo.keras import IPUStrategy
from ipu_dynamo.keras.attach.model_state import state_of

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 4)).astype("float32")
Y = RNG.standard_normal((64, 3)).astype("float32")


class Drop(L.Dropout):
    """Drops in predict, too."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        return super().call(inputs, training=True)


class Noise(L.Layer):
    """Draws without a seed, and with one that is a number."""

    def call(self, x: Any) -> Any:
        shape = keras.ops.shape(x)
        return x + 0.1 * keras.random.normal(shape) + keras.random.uniform((1,), seed=7)


def make(steps: int, *, staged: bool, seeded: bool = True, seed: int = 5) -> Any:
    """Dropout on both stages, noise with and without a seed."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            L.Dense(8, activation="tanh"),
            L.Dropout(0.3, seed=seed if seeded else None),
            L.GaussianNoise(0.1, seed=3),
            Noise(),
            L.Dense(6),
            L.Dropout(0.2, seed=9, noise_shape=(None, 1)),
            L.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.005), "mse", steps_per_execution=steps)
    if staged:
        model.set_pipeline_stage_assignment([0, 0, 0, 0, 1, 1, 1])
        model.set_pipelining_options(4)
    else:
        model.set_gradient_accumulation_options(4)
    return model


def weights(model: Any, replicas: int = 1) -> list[np.ndarray]:
    model.fit(X, Y, batch_size=2 // replicas, shuffle=False, verbose=0)
    return [*model.get_weights(), *(v.numpy() for v in model.non_trainable_variables)]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_calls_stages_and_compiling_again_change_no_bit(replicas):
    runs = []
    for staged, steps in ((False, 4), (False, 32), (True, 8)):
        with IPUStrategy(num_ipus=replicas * (2 if staged else 1)).scope():
            model = make(steps, staged=staged)
            first = weights(model, replicas)
            state_of(model).programs.clear()  # compile again, and go on
            runs.append([*first, *weights(model, replicas)])
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


def make_small(steps: int) -> Any:
    """Dropout on two stages, for what compiles it."""
    keras.utils.set_random_seed(1)
    layers = [L.Dense(4), L.Dropout(0.3, seed=5), L.Dense(3), L.Dropout(0.2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.SGD(0.005), "mse", steps_per_execution=steps)
    model.set_pipeline_stage_assignment([0, 0, 1, 1])
    model.set_pipelining_options(4)
    return model


@pytest.mark.slow
@pytest.mark.inductor
def test_workers_change_no_bit(monkeypatch):
    from ipu_dynamo.keras.calls import programs

    original, runs = programs.core_options, []
    for workers in (1, 2):
        from dataclasses import replace

        monkeypatch.setattr(
            programs,
            "core_options",
            lambda *a, w=workers, **k: replace(original(*a, **k), workers=w),
        )
        with IPUStrategy(num_ipus=2).scope():
            runs.append(weights(make_small(8)))
    assert same(*runs)


@pytest.mark.slow
def test_another_seed_draws_other_numbers():
    with IPUStrategy().scope():
        one, other = (weights(make(8, staged=False, seed=s)) for s in (5, 6))
    assert not same(one[:6], other[:6])


def test_replicas_draw_different_numbers():
    with IPUStrategy(num_ipus=2).scope():
        model = keras.Sequential([keras.Input((50,)), Drop(0.5, seed=1)])
        outputs = model.predict(np.ones((4, 50), "float32"), batch_size=2, verbose=0)
    assert not np.array_equal(outputs[:2], outputs[2:])


def test_predict_advances_the_state_and_the_host_sees_it():
    layer = Drop(0.5, seed=1)
    with IPUStrategy().scope():
        model = keras.Sequential([keras.Input((50,)), layer])
        model.compile(steps_per_execution=2)
        first = model.predict(np.ones((4, 50), "float32"), batch_size=1, verbose=0)
        state = layer.seed_generator.state
        assert state.numpy().tolist() == [1, 4]
        second = model.predict(np.ones((4, 50), "float32"), batch_size=1, verbose=0)
        assert len({row.tobytes() for row in (*first, *second)}) == 8
        state.assign([1, 0])
        third = model.predict(np.ones((4, 50), "float32"), batch_size=1, verbose=0)
    assert np.array_equal(first, third)


def test_a_keras_file_continues_the_sequence_and_a_weights_file_does_not(tmp_path):
    with IPUStrategy().scope():
        model = make(8, staged=False)
        weights(model)
        model.save(tmp_path / "m.keras")
        model.save_weights(tmp_path / "m.weights.h5")
        loaded = keras.models.load_model(tmp_path / "m.keras", custom_objects={"Noise": Noise})
        fresh = make(8, staged=False)
        fresh.load_weights(tmp_path / "m.weights.h5")
    seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
    for one, kept, new in zip(
        seeds,
        [v for v in loaded.non_trainable_variables if "seed" in v.path],
        [v for v in fresh.non_trainable_variables if "seed" in v.path],
        strict=True,
    ):
        assert one.numpy()[1] == 32
        assert np.array_equal(one.numpy(), kept.numpy())
        assert new.numpy()[1] == 0


def test_a_number_as_seed_is_a_constant_that_keras_draws():
    class Fixed(L.Layer):
        def call(self, x):
            return x + keras.random.uniform((4,), seed=7)

    with IPUStrategy().scope(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = keras.Sequential([keras.Input((4,)), Fixed()])
        outputs = model.predict(np.zeros((2, 4), "float32"), verbose=0)
    assert np.array_equal(outputs[0], keras.random.uniform((4,), seed=7).numpy())
    assert np.array_equal(outputs[1], outputs[0])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("draw", "mean", "deviation", "low", "high"),
    [
        (lambda g: keras.random.normal((4000,), 1.0, 2.0, seed=g), 1.0, 2.0, -20, 20),
        (lambda g: keras.random.uniform((4000,), -1.0, 3.0, seed=g), 1.0, 4 / 12**0.5, -1, 3),
        (lambda g: keras.random.truncated_normal((4000,), seed=g), 0.0, 0.8796, -2, 2),
        (lambda g: keras.random.randint((4000,), 0, 4, seed=g), 1.5, 1.118, 0, 3),
        (
            lambda g: keras.random.categorical(keras.ops.log([[0.1, 0.2, 0.7]]), 4000, seed=g)[0],
            1.6,
            0.663,
            0,
            2,
        ),
        (lambda g: keras.random.gamma((4000,), 0.8, seed=g), 0.8, 0.8**0.5, 0, 12),
        (lambda g: keras.random.gamma((4000,), 3.0, seed=g), 3.0, 3.0**0.5, 0, 20),
        (lambda g: keras.random.beta((4000,), 2.0, 0.5, seed=g), 0.8, 0.2138, 0, 1),
        (
            lambda g: keras.random.dropout(keras.ops.ones((4000,)), 0.25, seed=g),
            1.0,
            0.577,
            0,
            1.34,
        ),
    ],
)
def test_draws_have_their_distributions(draw, mean, deviation, low, high):
    generator = keras.random.SeedGenerator(3)

    class Draw(L.Layer):
        def __init__(self):
            super().__init__()
            self.generator = generator

        def call(self, x):
            return keras.ops.reshape(keras.ops.cast(draw(self.generator), "float32"), (1, -1))

    with IPUStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), Draw()])
        numbers = model.predict(np.zeros((1, 1), "float32"), verbose=0)[0]
    assert numbers.mean() == pytest.approx(mean, abs=0.12)
    assert numbers.std() == pytest.approx(deviation, rel=0.05)
    assert low <= numbers.min()
    assert numbers.max() <= high
    assert len(numbers) == 4000


def test_shuffle_permutes_along_its_axis():
    class Shuffle(L.Layer):
        def __init__(self):
            super().__init__()
            self.generator = keras.random.SeedGenerator(3)

        def call(self, x):
            return keras.random.shuffle(x, axis=0, seed=self.generator)

    x = np.arange(40, dtype="float32").reshape(20, 2)
    with IPUStrategy().scope():
        outputs = keras.Sequential([keras.Input((2,)), Shuffle()]).predict(x, batch_size=20)
    assert not np.array_equal(outputs, x)
    assert np.array_equal(outputs[outputs[:, 0].argsort()], x)


def test_a_draw_that_no_program_can_make_says_so():
    class Binomial(L.Layer):
        def call(self, x):
            return x * keras.random.binomial((1,), 4.0, 0.5)

    with IPUStrategy().scope(), pytest.raises(Exception, match=r"keras\.random\.binomial"):
        keras.Sequential([keras.Input((2,)), Binomial()]).predict(np.zeros((1, 2), "float32"))
