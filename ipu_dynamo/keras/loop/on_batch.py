"""Run one step on one batch, for `train_on_batch` and the like."""

from typing import Any

import keras

from ipu_dynamo.keras.calls.programs import call_shape, micro_batches_needed, replica_count
from ipu_dynamo.keras.loop.data.batches import normalised
from ipu_dynamo.keras.loop.execution import (
    ExecutionFunction,
    Kind,
    make_function,
)
from ipu_dynamo.keras.private.keras_private import (
    build_by_batch,
    python_logs,
    symbolic_build,
    to_numpy,
    weights_of_classes,
)


def train_on_batch(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """Run `train_on_batch` of an extended model; arguments as in Keras."""
    model._assert_compile_called("train_on_batch")
    if class_weight is not None:
        if sample_weight is not None:
            raise ValueError(
                "sample_weight and class_weight cannot be given at the same time: leave one out"
            )
        sample_weight = weights_of_classes(y, class_weight)
    function = make_function(model, "fit")
    return _step(function, (x, y, sample_weight), return_dict, method="train_on_batch")


def evaluate_on_batch(
    model: Any, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
) -> Any:
    """Run `test_on_batch` of an extended model; arguments as in Keras."""
    model._assert_compile_called("test_on_batch")
    function = make_function(model, "evaluate")
    return _step(function, (x, y, sample_weight), return_dict, method="test_on_batch")


def predict_on_batch(model: Any, x: Any) -> Any:
    """Run `predict_on_batch` of an extended model; arguments as in Keras."""
    function = make_function(model, "predict")
    _check_one_batch(model, "predict", "predict_on_batch")
    batch = normalised((x,), copy=False)
    build_by_batch(model, batch[0])
    outputs = function.run([batch], call_shape(model, "predict", 1))
    return keras.tree.map_structure(to_numpy, outputs)


def _step(function: ExecutionFunction, data: Any, return_dict: bool, *, method: str) -> Any:
    """Run one step from fresh metrics; its logs as Keras returns them."""
    model = function.model
    _check_one_batch(model, function.kind, method)
    batch = normalised(data, copy=False)
    symbolic_build(model, iter([(0, 0, [batch])]))
    model.reset_metrics()
    logs = python_logs(function.run([batch], call_shape(model, function.kind, 1)))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _check_one_batch(model: Any, kind: Kind, method: str) -> None:
    """Refuse a batch that is no whole execution.

    Raises:
        ValueError: each step or each update takes more than one batch.
    """
    replicas, micro_batches = replica_count(model), micro_batches_needed(model, kind)
    if replicas * micro_batches > 1:
        raise ValueError(
            f"{method} runs one batch, and an execution of {model.name} takes at least "
            f"{replicas * micro_batches}: {micro_batches} on each of {replicas} replicas. "
            f"Use {kind}"
        )
