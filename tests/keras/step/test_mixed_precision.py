"""Compare training in half precision with plain Keras, and look at what gradients are summed in."""

from typing import Any

import keras
import numpy as np
import pytest
import torch

from ipu_dynamo.keras import IPUStrategy
from ipu_dynamo.keras.attach.model_state import state_of

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.standard_normal((200, 8)).astype("float32")
Y = (X.sum(1) > 0).astype("int32") + (X[:, 0] > 0.5).astype("int32")


@pytest.fixture
def policy(request):
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    if request.param == "float16":
        keras.config.set_floatx("float16")
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


def make(steps: int = 1) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), L.Dense(16, activation="relu"), L.LayerNormalization(), L.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, steps_per_execution=steps)
    return model


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "policy",
    [pytest.param("mixed_float16", marks=pytest.mark.inductor), "mixed_bfloat16", "float16"],
    indirect=True,
)
def test_losses_are_within_two_percent_of_plain_keras(policy):
    plain = make()
    with IPUStrategy().scope():
        model = make(10)
        model.set_gradient_accumulation_options(2, "mean")
        losses = model.fit(X, Y, batch_size=10, epochs=5, shuffle=False, verbose=0).history["loss"]
    expected = plain.fit(X, Y, batch_size=20, epochs=5, shuffle=False, verbose=0).history["loss"]
    assert int(model.optimizer.iterations.value) == 50
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    (program,) = state_of(model).programs.values()
    sums = [v for v in program.compiled.program.variables if v.kind == "accumulator"]
    assert {v.type.dtype for v in sums} == {torch.float32}
    name = "LossScaleOptimizer" if policy == "mixed_float16" else "SGD"
    assert type(model.optimizer).__name__ == name


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", {torch.bfloat16}),
        (torch.float64, {torch.float64}),
        (lambda v: "float64" if "kernel" in v.path else None, {torch.float64, torch.float32}),
    ],
    ids=["a name", "a dtype", "a function"],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_gradients_are_summed_in_the_dtype_that_is_set(dtype, expected, stages):
    plain = make()
    with IPUStrategy(num_ipus=stages).scope():
        model = make(6)
        if stages == 1:
            model.set_gradient_accumulation_options(3, "mean", dtype=dtype)
        else:
            model.set_pipeline_stage_assignment([0, 0, 1])
            model.set_pipelining_options(
                3, gradient_accumulation_reduction_method="mean", gradient_accumulation_dtype=dtype
            )
        model.fit(X[:36], Y[:36], batch_size=6, shuffle=False, verbose=0)
    plain.fit(X[:36], Y[:36], batch_size=18, shuffle=False, verbose=0)
    (program,) = state_of(model).programs.values()
    sums = [v for v in program.compiled.program.variables if v.kind == "accumulator"]
    assert {v.type.dtype for v in sums} == expected
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3 if dtype == "bfloat16" else 1e-6)
