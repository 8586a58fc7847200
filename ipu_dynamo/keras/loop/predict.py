"""Predict with an extended model: the loop of Keras, with executions of several steps."""

from collections import deque
from typing import Any

import keras
import numpy as np

from ipu_dynamo.keras.loop.callback_list import callback_list, threads_ended
from ipu_dynamo.keras.loop.execution import make_function
from ipu_dynamo.keras.loop.log_lines import advise_steps
from ipu_dynamo.keras.loop.prepare import Prepared, prepare
from ipu_dynamo.keras.loop.run_epoch import Work, run_epoch
from ipu_dynamo.keras.private.keras_private import to_numpy


def predict(
    model: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """What `predict` of an extended model does; arguments as in Keras."""
    advise_steps(model)
    prepared = prepare(
        model,
        "predict",
        argument="steps",
        number=steps,
        x=x,
        batch_size=batch_size,
        shuffle=False,
    )
    try:
        executions = _predict(model, prepared, verbose, callbacks)
    finally:
        prepared.epochs.close()
    if not executions:
        raise ValueError("the data has no batch to predict from")
    return keras.tree.map_structure(
        lambda *outputs: np.concatenate([to_numpy(output) for output in outputs]), *executions
    )


def _predict(model: Any, prepared: Prepared, verbose: Any, callbacks: Any) -> deque[Any]:
    """The outputs of each execution."""
    epochs = prepared.epochs
    callbacks = callback_list(
        model, callbacks, verbose=verbose, epochs=1, steps=prepared.plan.steps
    )
    model.eval()
    function = make_function(model, "predict")
    model.stop_predicting = False
    executions: deque[Any] = deque()
    with threads_ended(callbacks):
        callbacks.on_predict_begin()
        run_epoch(Work(function, prepared.shape, epochs, callbacks), executions)
        callbacks.on_predict_end()
    return executions
