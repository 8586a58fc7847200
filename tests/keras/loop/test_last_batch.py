"""Check that data of any number of rows gives the numbers of plain Keras."""

from typing import Any

import keras
import numpy as np
import pytest
import torch

from ipu_dynamo.keras import IPUStrategy
from tests.keras.loop.cases import Recorder, arrays, small_model

BATCH = 32
FIT = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}


def of_arrays(x: Any, y: Any) -> dict[str, Any]:
    return {"x": x, "y": y, "batch_size": BATCH}


def of_loader(x: Any, y: Any) -> dict[str, Any]:
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return {"x": torch.utils.data.DataLoader(dataset, batch_size=BATCH)}


def of_generator(x: Any, y: Any) -> dict[str, Any]:
    def batches() -> Any:
        while True:
            for first in range(0, len(x), BATCH):
                yield x[first : first + BATCH], y[first : first + BATCH]

    return {"x": batches(), "steps": -(-len(x) // BATCH)}


def results(source: Any, rows: int) -> list[Any]:
    """The numbers of fit, evaluate and predict, and those that callbacks get."""
    x, y = arrays(rows)
    model, recorder = small_model(), Recorder()
    fit = {"epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [recorder], **source(x, y)}
    if "steps" in fit:
        fit["steps_per_epoch"] = fit.pop("steps")
    history = model.fit(**fit).history
    logs = model.evaluate(**source(x, y), verbose=0, callbacks=[recorder], return_dict=True)
    of_x = {name: value for name, value in source(x, y).items() if name != "y"}
    outputs = model.predict(**of_x, verbose=0, callbacks=[recorder])
    return [history, logs, outputs, model.get_weights(), recorder.calls]


def split(rows: int) -> list[Any]:
    """The numbers of fit with a part of the rows to validate with."""
    model, recorder = small_model(), Recorder()
    options = {"validation_split": 0.3, "callbacks": [recorder]}
    history = model.fit(*arrays(rows), **FIT, **options).history
    return [history, model.get_weights(), recorder.calls]


def same(mine: Any, plain: Any) -> None:
    keras.tree.assert_same_structure(mine, plain)
    for a, b in zip(keras.tree.flatten(mine), keras.tree.flatten(plain), strict=True):
        a, b = (keras.ops.convert_to_numpy(v) if isinstance(v, torch.Tensor) else v for v in (a, b))
        if isinstance(b, str):
            assert a == b
        elif b is not None:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("source", "rows"),
    [
        (of_arrays, 33),
        (of_generator, 70),
        (of_loader, 70),
        slow(of_generator, 100),
        *(slow(of_arrays, rows) for rows in (1, 31, 32, 64, 65, 97, 100)),
        slow(of_loader, 33),
        slow(of_generator, 33),
    ],
)
def test_a_last_batch_of_fewer_rows_is_as_in_plain_keras(source, rows):
    expected = results(source, rows)
    with IPUStrategy().scope():
        same(results(source, rows), expected)


@pytest.mark.parametrize("rows", [slow(2), slow(46), slow(47), slow(64), 100])
def test_a_split_of_any_size_is_as_in_plain_keras(rows):
    expected = split(rows)
    with IPUStrategy().scope():
        same(split(rows), expected)
