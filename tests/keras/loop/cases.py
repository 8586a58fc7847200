"""Small models and data, and a callback that writes down what it is called with."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from ipu_dynamo.keras.attach.scope import enter_scope, leave_scope
from ipu_dynamo.keras.attach.strategy import current_strategy


def arrays(rows: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 3)).astype("float32")
    y = rng.standard_normal((rows, 2)).astype("float32")
    return x, y


def small_model(steps: int = 1, *, seed: int = 1, metrics: Any = ("mae",)) -> Any:
    """A compiled model of one layer; extended if a scope is open."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(
        keras.optimizers.SGD(0.05), "mse", metrics=list(metrics), steps_per_execution=steps
    )
    return model


class Recorder(keras.callbacks.Callback):
    """Write down each hook, its number and its logs, and the thread of batch hooks.

    Its own end hooks of batches keep Keras from calling it in a pool.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[threading.Thread] = set()

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def numbers(self, name: str) -> list[int]:
        return [call[1] for call in self.calls if call[0] == name]

    def logs(self, name: str) -> list[Any]:
        return [call[2] for call in self.calls if call[0] == name]


def _hook(name: str) -> Any:
    if name.split("_")[-1] == "begin" and "batch" not in name and "epoch" not in name:
        return lambda self, logs=None: self.calls.append((name, None, dict(logs or {})))
    if "batch" not in name and "epoch" not in name:
        return lambda self, logs=None: self.calls.append((name, None, dict(logs or {})))

    def hook(self: Recorder, number: int, logs: Any = None) -> None:
        if "batch" in name:
            self.threads.add(threading.current_thread())
        self.calls.append((name, number, dict(logs or {})))

    return hook


for _kind in ("train", "test", "predict"):
    for _end in ("begin", "end"):
        for _name in (f"on_{_kind}_{_end}", f"on_{_kind}_batch_{_end}"):
            setattr(Recorder, _name, _hook(_name))
for _end in ("begin", "end"):
    setattr(Recorder, f"on_epoch_{_end}", _hook(f"on_epoch_{_end}"))


@contextmanager
def outside_scopes() -> Iterator[None]:
    """Leave the strategy's scope for a while: models are plain Keras'."""
    strategy = current_strategy()
    if strategy is not None:
        leave_scope()
    try:
        yield
    finally:
        if strategy is not None:
            enter_scope(strategy)
