"""Turn the replicas' results into logs and outputs, and keep the last logs of a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch

from ipu_dynamo.keras.private.keras_graphs import (
    in_stateless_scope,
)
from ipu_dynamo.keras.private.keras_private import (
    variable_value,
)
from ipu_dynamo.keras.replica_values import reduce_result
from ipu_dynamo.keras.settings.enumerations import ReplicatedMetricReductionMethod

LAST = "_ipu_dynamo_last_logs"  # in the instance's __dict__, past Keras' and PyTorch's tracking


@dataclass(frozen=True, slots=True)
class LastLogs:
    """Logs of a model's last execution, and the contents of its metrics' variables since then.

    Args:
        logs: reduced over replicas.
        contents: which tensor each variable had, and how often that had been written to.
    """

    logs: Mapping[str, Any]
    contents: tuple[tuple[int, int], ...]


def reduced_logs(
    method: ReplicatedMetricReductionMethod, replicas: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The logs of one step, from those of its replicas."""
    logs: dict[str, Any] = keras.tree.map_structure(
        lambda *values: reduce_result(method, values), *map(dict, replicas)
    )
    return logs


def joined_rows(parts: Sequence[Any]) -> Any:
    """The outputs of several batches as those of one, with the rows in order."""
    return keras.tree.map_structure(
        lambda *outputs: None if outputs[0] is None else torch.cat(outputs), *parts
    )


def remember_logs(model: Any, logs: Mapping[str, Any]) -> None:
    """Make `logs` the model's metrics until the host assigns a variable of theirs."""
    vars(model)[LAST] = LastLogs(dict(logs), _contents(model))


def metrics_result(model: Any, keras_own: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `get_metrics_result` of an extended model.

    That is the reduced logs of its last execution. While a step is traced, before the first
    execution, and after the host assigned a variable of a metric, it is Keras' own.
    """
    last: LastLogs | None = vars(model).get(LAST)
    if last is None or in_stateless_scope() or last.contents != _contents(model):
        return keras_own()
    return dict(last.logs)


def _contents(model: Any) -> tuple[tuple[int, int], ...]:
    tensors = [variable_value(v) for metric in model.metrics for v in metric.variables]
    return tuple((id(tensor), tensor._version) for tensor in tensors)
