"""Reduce the replicas' values to one: results of metrics, and states of their objects."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.keras.settings.enumerations import ReplicatedMetricReductionMethod as Method


def reduce_state(method: Method, states: Sequence[Tensor]) -> Tensor:
    """Reduce a metric's variable over the replicas to the value that the host sees.

    Variables that are not floating are the last replica's: a mean of counts is not a count.
    """
    if not states[-1].is_floating_point():
        return states[-1]
    match method:
        case Method.SUM:
            return torch.stack(list(states)).sum(0)
        case Method.MEAN:
            return torch.stack(list(states)).mean(0)
        case Method.NONE | Method.LIST:
            return states[-1]


def reduce_result(method: Method, results: Sequence[Any]) -> Any:
    """One metric's result over replicas; with one replica the result itself."""
    if len(results) == 1 or method is Method.NONE:
        return results[-1]
    if method is Method.LIST:
        return [_number(result) for result in results]
    stacked = torch.stack([torch.as_tensor(result) for result in results])
    if method is Method.SUM:
        return stacked.sum(0)
    return (stacked if stacked.is_floating_point() else stacked.float()).mean(0)


def _number(result: Any) -> Any:
    """A Python number where the result is one; callbacks that write lists print them."""
    if isinstance(result, Tensor) and result.ndim == 0:
        return result.item()
    return result
