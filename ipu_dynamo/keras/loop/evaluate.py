"""Evaluate an extended model: the loop of Keras, with executions of several steps."""

from collections import deque
from contextlib import nullcontext
from typing import Any

from ipu_dynamo.keras.loop.frame import prepared_data, single_pass
from ipu_dynamo.keras.loop.log_lines import advise_steps
from ipu_dynamo.keras.loop.prepare import Prepared
from ipu_dynamo.keras.loop.run_epoch import run_epoch
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
    """Run `evaluate` of an extended model; arguments as in Keras."""
    cached = kwargs.pop("_use_cached_eval_dataset", False)  # by `fit`, as Keras' own does
    if kwargs:
        raise ValueError(f"Arguments not recognized: {kwargs}")
    advise_steps(model)
    validation: Prepared | None = vars(model).get(VALIDATION) if cached else None
    data = (
        nullcontext(validation)
        if validation is not None
        else prepared_data(
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
    )
    with data as prepared:
        logs = _evaluate(model, prepared, verbose, callbacks)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate(model: Any, prepared: Prepared, verbose: Any, callbacks: Any) -> dict[str, Any]:
    prepared.epochs.reset()
    last: deque[Any] = deque(maxlen=1)
    with single_pass(model, "evaluate", prepared, verbose=verbose, callbacks=callbacks) as work:
        work.callbacks.on_test_begin()
        model.reset_metrics()
        run_epoch(work, last)
        logs: dict[str, Any] = python_logs(metrics_or_logs(model, last[0] if last else {}))
        work.callbacks.on_test_end(logs)
    return logs
