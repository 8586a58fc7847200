"""List Keras' optimisers, their flags and schedules, and train with and without us."""

from typing import Any

import keras
import numpy as np

from ipu_dynamo.keras import IPUStrategy

optimizers = keras.optimizers
schedules = keras.optimizers.schedules
UPDATES = 20
WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer")
CLASSES = tuple(
    sorted(
        name
        for name, value in vars(optimizers).items()
        if isinstance(value, type)
        and issubclass(value, optimizers.Optimizer)
        and name not in ("Optimizer", *WRAPPERS)
    )
)
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "weight_decay": {"weight_decay": 0.1},
    "ema": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
    "loss_scale": {},
}
SCHEDULES: dict[str, Any] = {
    "CosineDecay": lambda: schedules.CosineDecay(0.02, 12, 0.1, warmup_target=0.05, warmup_steps=4),
    "CosineDecay, no warm-up": lambda: schedules.CosineDecay(0.02, 12),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.02, 4, 1.5, 0.8, 0.1),
    "CosineDecayRestarts, equal": lambda: schedules.CosineDecayRestarts(0.02, 4, 1.0, 0.8),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.02, 3, 0.8),
    "ExponentialDecay, staircase": lambda: schedules.ExponentialDecay(0.02, 3, 0.8, True),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.02, 3, 0.5),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([4, 9], [0.02, 0.01, 0.03]),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.02, 8, 0.001, 0.7, cycle=True),
    "PolynomialDecay, once": lambda: schedules.PolynomialDecay(0.02, 8, 0.001, 0.7),
}
SCHEDULED = {
    "SGD": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {},
    "RMSprop": {},
}


def make_optimizer(name: str, flag: str, rate: Any = 0.01) -> Any:
    """An optimiser by name; with `loss_scale` in a LossScaleOptimizer."""
    options = FLAGS[flag]
    if name == "MultiOptimizer":
        one = optimizers.SGD(rate, momentum=0.9, **options)
        other = optimizers.Adam(rate, **options)
        optimizer = optimizers.MultiOptimizer(lambda v: one if "kernel" in v.path else other)
    else:
        more = SCHEDULED.get(name, {}) if flag == "plain" else {}
        optimizer = getattr(optimizers, name)(learning_rate=rate, **options, **more)
    if flag == "loss_scale" and name != "MultiOptimizer":
        return optimizers.LossScaleOptimizer(optimizer, 2.0**10, dynamic_growth_steps=4)
    return optimizer


def make_model(optimizer: Any, *, steps: int = 1) -> Any:
    """A kernel and a bias, which is all that couples updates; extended if a scope is open."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh")])
    model.compile(optimizer, "mse", steps_per_execution=steps)
    return model


def data(*, infinite: bool) -> tuple[np.ndarray, np.ndarray]:
    """Batches of 4 for all updates; one of them makes the gradient infinite."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4 * UPDATES, 4)).astype("float32")
    y = rng.standard_normal((4 * UPDATES, 3)).astype("float32")
    if infinite:
        y[4 * 7] = np.inf
    return x, y


def train_both(name: str, flag: str, rate: Any = lambda: 0.01) -> tuple[Any, Any]:
    """A plain model and an extended one after the same updates."""
    x, y = data(infinite=flag == "loss_scale" and name != "MultiOptimizer")
    plain = make_model(make_optimizer(name, flag, rate()))
    with IPUStrategy().scope():
        model = make_model(make_optimizer(name, flag, rate()), steps=UPDATES // 2)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    if name == "ScheduleFreeAdamW":  # eager Keras differs from its own stateless_apply
        _train_statelessly(plain, x, y)
    else:
        plain.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return plain, model


def differences(plain: Any, model: Any) -> dict[str, float]:
    """How far weights and states are apart, relative to their largest value or 1."""
    found = {}
    pairs = [*zip(plain.variables, model.variables, strict=True)]
    pairs += [*zip(plain.optimizer.variables, model.optimizer.variables, strict=True)]
    for number, (expected, actual) in enumerate(pairs):
        a, b = expected.numpy().astype("float64"), actual.numpy().astype("float64")
        scale = max(1.0, np.abs(a).max())
        found[f"{number} {expected.path}"] = float(np.abs(a - b).max() / scale)
    return found


def _train_statelessly(model: Any, x: Any, y: Any) -> None:
    """Train by `stateless_apply` on plain tensors, step by step."""
    import torch

    from ipu_dynamo.keras.step.conditions import conditions_merged
    from ipu_dynamo.keras.step.portable_methods import portable_methods

    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    for start in range(0, len(x), 4):
        outputs = model(x[start : start + 4], training=True)
        loss = optimizer.scale_loss(
            model.compute_loss(y=torch.tensor(y[start : start + 4]), y_pred=outputs)
        )
        gradients = torch.autograd.grad(loss, [v.value for v in model.trainable_variables])
        with torch.no_grad(), portable_methods(optimizer), conditions_merged():
            weights, states = optimizer.stateless_apply(
                [v.value for v in optimizer.variables],
                list(gradients),
                [v.value for v in model.trainable_variables],
            )
        for variable, value in zip(model.trainable_variables, weights, strict=True):
            variable.assign(value)
        for variable, value in zip(optimizer.variables, states, strict=True):
            variable.assign(value)
    optimizer.finalize_variable_values(model.trainable_variables)
