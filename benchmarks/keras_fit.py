"""Time `fit` of Keras models beside plain Keras: `python -m benchmarks.keras_fit [--seconds N]`.

Each contender has a model of its own and fits the same arrays, in turn. Plain Keras is timed on
torch's eager mode, and with `jit_compile=True`. Times are of an epoch, `first` with compilation.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch

from benchmarks.measure import Clock, Timing, clock, side_by_side
from ipu_dynamo.keras import IPUStrategy
from ipu_dynamo.keras.calls import programs

L = keras.layers
BATCH, STEPS = 32, 64
Make = Callable[[], Any]


def mlp() -> Any:
    """784-128-10, with Adam."""
    return _compiled(
        keras.Sequential([keras.Input((784,)), L.Dense(128, activation="relu"), L.Dense(10)])
    )


def cnn() -> Any:
    """Two convolutions on images of 28 x 28."""
    return _compiled(
        keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                L.Conv2D(8, 3, strides=2, activation="relu"),
                L.Conv2D(16, 3, strides=2, activation="relu"),
                L.Flatten(),
                L.Dense(10),
            ]
        )
    )


def wide() -> Any:
    """Six layers of 1024, for two stages of equal work."""
    layers = [L.Dense(1024, activation="relu") for _ in range(6)]
    return _compiled(keras.Sequential([keras.Input((1024,)), *layers, L.Dense(10)]))


def epochs(make: Make, shape: tuple[int, ...], *, seconds: float) -> dict[str, Timing]:
    """Epochs of 64 batches: ours as one execution, and plain Keras."""
    x, y = _data(STEPS, shape)
    contenders: dict[str, Clock] = {
        "ipu_dynamo.keras": clock(_ours(make, x, y)),
        "jit_compile=True": clock(_plain(make, x, y, jit_compile=True)),
        "plain Keras": clock(_plain(make, x, y, jit_compile=False)),
    }
    try:  # so the first call of this contender finds some of its code in memory
        _plain(make, *_data(1, shape), jit_compile=True)()
    except RuntimeError as error:  # Inductor may have no code for it
        print(f"jit_compile=True is left out: {str(error).splitlines()[0]}", flush=True)
        del contenders["jit_compile=True"]
        torch.compiler.reset()
    return side_by_side(contenders, seconds=seconds)


def pipeline(*, seconds: float) -> dict[str, Timing]:
    """A pipeline of two stages, by two workers and by one."""
    x, y = _data(16, (1024,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        two, one = (_pipelined(x, y, workers=workers) for workers in (2, 1))
        return side_by_side({"2 workers": clock(two), "1 worker": clock(one)}, seconds=seconds)
    finally:
        torch.set_num_threads(threads)


def _ours(make: Make, x: Any, y: Any) -> Callable[[], object]:
    strategy = IPUStrategy()
    with strategy.scope():
        model = make()
    model.steps_per_execution = STEPS

    def fit() -> None:
        with strategy.scope():
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)

    return fit


def _pipelined(x: Any, y: Any, *, workers: int) -> Callable[[], object]:
    strategy, options = IPUStrategy(num_ipus=2), programs.core_options
    with strategy.scope():
        model = wide()
        model.set_pipeline_stage_assignment([0, 0, 0, 1, 1, 1, 1])
        model.set_pipelining_options(16, gradient_accumulation_reduction_method="mean")
    model.steps_per_execution = 16

    def fit() -> None:
        programs.core_options = lambda *a: replace(options(*a), workers=workers)
        try:
            with strategy.scope():
                model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        finally:
            programs.core_options = options

    return fit


def _plain(make: Make, x: Any, y: Any, *, jit_compile: bool) -> Callable[[], object]:
    model = make()
    model.jit_compile = jit_compile
    return lambda: model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def _compiled(model: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def _data(batches: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    count = batches * BATCH
    x = rng.standard_normal((count, *shape)).astype("float32")
    return x, rng.integers(0, 10, count).astype("int32")


def table(title: str, timings: Mapping[str, Timing]) -> str:
    """A table of contenders; ratios to the last one."""
    rows = [f"{title:28} {'first, s':>10} {'median, ms':>11} {'times':>6}"]
    for name, timing in timings.items():
        times = 1 / timing.ratio
        rows.append(f"{name:28} {timing.first:10.1f} {1e3 * timing.median:11.2f} {times:6.2f}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each comparison")
    parser.add_argument("--only", choices=("mlp", "cnn", "pipeline"), help="one of them")
    args = parser.parse_args()
    comparisons: dict[str, Callable[[], dict[str, Timing]]] = {
        "mlp": lambda: epochs(mlp, (784,), seconds=args.seconds),
        "cnn": lambda: epochs(cnn, (28, 28, 1), seconds=args.seconds),
        "pipeline": lambda: pipeline(seconds=args.seconds),
    }
    for name, compare in comparisons.items():
        if args.only in (None, name):
            print(table(name, compare()), flush=True)


if __name__ == "__main__":
    main()
