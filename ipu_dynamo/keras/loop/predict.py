"""Predict with an extended model: the loop of Keras, with executions of several steps."""

from collections import deque
from typing import Any

import keras
import numpy as np

from ipu_dynamo.keras.loop.frame import prepared_data, single_pass
from ipu_dynamo.keras.loop.log_lines import advise_steps
from ipu_dynamo.keras.loop.run_epoch import run_epoch
from ipu_dynamo.keras.private.keras_private import to_numpy


def predict(
    model: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Run `predict` of an extended model; arguments as in Keras."""
    advise_steps(model)
    executions: deque[Any] = deque()
    data = prepared_data(
        model,
        "predict",
        argument="steps",
        number=steps,
        x=x,
        batch_size=batch_size,
        shuffle=False,
    )
    with (
        data as prepared,
        single_pass(model, "predict", prepared, verbose=verbose, callbacks=callbacks) as work,
    ):
        work.callbacks.on_predict_begin()
        run_epoch(work, executions)
        work.callbacks.on_predict_end()
    if not executions:
        raise ValueError("the data has no batch to predict from")
    return keras.tree.map_structure(
        lambda *outputs: np.concatenate([to_numpy(output) for output in outputs]), *executions
    )
