"""Evaluate an extended model: the loop of Keras, with executions of several steps."""

from collections import deque
from typing import Any

from ipu_dynamo.keras.loop.callback_list import callback_list, threads_ended
from ipu_dynamo.keras.loop.execution import make_function
from ipu_dynamo.keras.loop.log_lines import advise_steps
from ipu_dynamo.keras.loop.prepare import Prepared, prepare
from ipu_dynamo.keras.loop.run_epoch import Work, run_epoch
from ipu_dynamo.keras.private.keras_private import metrics_or_logs, python_logs

VALIDATION = "_ipu_dynamo_validation"  # the data of fit's validations, in the instance's __dict__


def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    **kwargs: Any,
) -> Any:
    """What `evaluate` of an extended model does; arguments as in Keras."""
    cached = kwargs.pop("_use_cached_eval_dataset", False)  # by `fit`, as Keras' own does
    if kwargs:
        raise ValueError(f"Arguments not recognized: {kwargs}")
    advise_steps(model)
    prepared: Prepared | None = vars(model).get(VALIDATION) if cached else None
    if prepared is not None:
        logs = _evaluate(model, prepared, verbose, callbacks)
    else:
        prepared = prepare(
            model,
            "evaluate",
            argument="steps",
            number=steps,
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            shuffle=False,
        )
        try:
            logs = _evaluate(model, prepared, verbose, callbacks)
        finally:
            prepared.epochs.close()
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate(model: Any, prepared: Prepared, verbose: Any, callbacks: Any) -> dict[str, Any]:
    epochs = prepared.epochs
    epochs.reset()
    callbacks = callback_list(
        model, callbacks, verbose=verbose, epochs=1, steps=prepared.plan.steps
    )
    model.eval()
    function = make_function(model, "evaluate")
    model.stop_evaluating = False
    last: deque[Any] = deque(maxlen=1)
    with threads_ended(callbacks):
        callbacks.on_test_begin()
        model.reset_metrics()
        work = Work(function, prepared.shape, epochs, callbacks)
        run_epoch(work, last)
        logs: dict[str, Any] = python_logs(metrics_or_logs(model, last[0] if last else {}))
        callbacks.on_test_end(logs)
    return logs
