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


def spectral(optimizer: Any = None, *, steps: int = 1) -> Any:
    """Kernels that are normalised in each step of training, the second once it is not zero."""
    keras.utils.set_random_seed(1)
    norm = L.SpectralNormalization
    layers = [
        norm(L.Dense(3, kernel_regularizer="l2", name="outer"), power_iterations=2),
        norm(L.Dense(2, name="inner", kernel_initializer="zeros")),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", steps_per_execution=steps)
    return model


OPTIMIZERS = {
    "averages": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=0.5, weight_decay=0.1),
        4.0,
        dynamic_growth_steps=2,
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_weight_that_a_step_assigns_trains_as_in_plain_keras(name: str) -> None:
    y = Y.copy()
    if name == "scaled":  # an update is left out, and the assignment stays
        y[6] = np.inf
    plain = spectral(OPTIMIZERS[name]())
    plain.fit(X, y, batch_size=2, shuffle=False, verbose=0)
    with IPUStrategy().scope():
        model = spectral(OPTIMIZERS[name](), steps=3)
        model.fit(X, y, batch_size=2, shuffle=False, verbose=0)
        logs = model.evaluate(X, Y, batch_size=2, verbose=0)
    assert logs == pytest.approx(plain.evaluate(X, Y, batch_size=2, verbose=0), rel=1e-5)
    assert len(plain.variables) == len(model.variables)
    for a, b in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=a.path)
    for a, b in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=a.path)


def test_a_weight_is_assigned_in_its_own_stage() -> None:
    plain = spectral()
    plain.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    with IPUStrategy(2).scope():
        model = spectral(steps=3)
        model.set_pipeline_stage_assignment([0, 1])
        model.set_pipelining_options(pipeline_schedule="Sequential")
        model.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    for a, b in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=a.path)


class Clipped(L.Dense):
    """Clips its kernel before each use, on a condition, in evaluation too if asked for."""

    always = False

    def call(self, x: Any, training: Any = None) -> Any:
        def clip() -> Any:
            self.kernel.assign(ops.clip(self.kernel, -0.3, 0.3))
            return super(Clipped, self).call(x)

        def leave() -> Any:
            return super(Clipped, self).call(x)

        if not (training or self.always):
            return leave()
        return ops.cond(ops.sum(x) > 0, clip, leave)


def clipped(**options: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), Clipped(3, name="clipped"), L.Dense(2)])
    model.compile(keras.optimizers.SGD(0.3), "mse", **options)
    return model


def test_a_weight_that_a_branch_assigns_trains_as_in_plain_keras() -> None:
    plain = clipped()
    plain.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    with IPUStrategy().scope():
        model = clipped(steps_per_execution=3)
        model.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ipus", "accumulation", "words"),
    [(1, 3, "3 micro-batches"), (2, 1, "each of 2 replicas")],
)
def test_assignments_that_steps_would_not_see_are_refused(
    ipus: int, accumulation: int, words: str
) -> None:
    with IPUStrategy(ipus).scope():
        model = spectral(steps=3)
        model.set_gradient_accumulation_options(accumulation)
        before = model.get_weights()
        message = (
            rf"layer spectral_norm\w* \(SpectralNormalization\) assigns .*outer/kernel, .*{words}"
        )
        with pytest.raises(CompileError, match=message):
            model.fit(X, Y, batch_size=2, verbose=0)
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)
        assert model.predict(X, batch_size=2, verbose=0).shape == (12, 2)


def test_a_weight_is_assigned_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clipped, "always", True)
    with IPUStrategy().scope():
        model = clipped(steps_per_execution=3)
        with pytest.raises(CompileError, match=r"layer clipped .*clipped/kernel.* in evaluate"):
            model.evaluate(X, Y, batch_size=2, verbose=0)
