"""Turn the arguments of each setter into changed settings, after checking them."""

from collections.abc import Mapping, MutableSet
from types import MappingProxyType
from typing import Any

from ipu_dynamo.keras.settings import keyword_tables
from ipu_dynamo.keras.settings.enumerations import (
    GradientAccumulationReductionMethod,
    ReplicatedMetricReductionMethod,
)
from ipu_dynamo.keras.settings.notices import notice


class _Default(str):
    """A default, which a call that writes the same text does not give."""


DEFAULT_REDUCTION = _Default("sum")
_SHARDINGS = ("replicated_optimizer_state_sharding", "replicated_weight_sharding")


def gradient_accumulation(
    steps: Any, method: Any, use_v2: Any, keywords: Mapping[str, Any], notices: MutableSet[str]
) -> dict[str, Any]:
    """The changes of `set_gradient_accumulation_options`.

    Raises:
        ValueError: an argument is wrong, or the method is given under both of its names.
    """
    keywords = dict(keywords)
    if "reduction_method" in keywords:
        other = keywords.pop("reduction_method")
        if method is not DEFAULT_REDUCTION:
            raise ValueError(
                f"gradient_accumulation_reduction_method is {method!r} and reduction_method is "
                f"{other!r}: they are two names of one argument, give one of them"
            )
        method = other
    checked = keyword_tables.ACCUMULATION.check(keywords)
    changes = {
        "reduction": reduction_method(method),
        "accumulation_keywords": MappingProxyType(checked),
    }
    if steps is not None:
        changes["accumulation_steps"] = accumulation_steps(steps)
    if use_v2:
        notice(
            notices,
            "use_v2_gradient_accumulation_optimizer",
            "use_v2_gradient_accumulation_optimizer=True is ignored: there is one way to "
            "accumulate gradients here",
        )
    _notice_shardings(checked, notices)
    return changes


def pipelining(
    steps: Any,
    device_mapping: Any,
    accumulate_outfeed: Any,
    method: Any,
    keywords: Mapping[str, Any],
    notices: MutableSet[str],
) -> dict[str, Any]:
    """The changes of `set_pipelining_options`."""
    checked = keyword_tables.PIPELINING.check(keywords)
    changes = {
        "reduction": reduction_method(method),
        "pipelining_keywords": MappingProxyType(checked),
    }
    if steps is not None:
        changes["pipelining_accumulation_steps"] = accumulation_steps(steps)
    if device_mapping is not None:
        changes["device_mapping"] = ipus_of_stages(device_mapping)
    if accumulate_outfeed is not None:
        changes["accumulate_outfeed"] = flag(accumulate_outfeed, "accumulate_outfeed")
    _notice_shardings(checked, notices)
    return changes


def replication(method: Any) -> dict[str, Any]:
    """The changes of `set_replication_options`."""
    option = "replicated_metric_reduction_method"
    return {"metric_reduction": ReplicatedMetricReductionMethod.parse(method, option)}


def infeed(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of `set_infeed_queue_options`."""
    return {"infeed_keywords": MappingProxyType(keyword_tables.INFEED.check(keywords))}


def outfeed(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of `set_outfeed_queue_options`."""
    return {"outfeed_keywords": MappingProxyType(keyword_tables.OUTFEED.check(keywords))}


def reduction_method(method: Any) -> GradientAccumulationReductionMethod:
    """The member that a user named."""
    option = "gradient_accumulation_reduction_method"
    return GradientAccumulationReductionMethod.parse(method, option)


def accumulation_steps(steps: Any) -> int:
    """The checked number of micro-batches for each update."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            f"gradient_accumulation_steps_per_replica is {steps!r}, and has to be a positive "
            "integer"
        )
    return steps


def ipus_of_stages(device_mapping: Any) -> tuple[int, ...]:
    """The checked IPUs, by stage."""
    integers = isinstance(device_mapping, list) and all(
        isinstance(ipu, int) and not isinstance(ipu, bool) for ipu in device_mapping
    )
    if not integers:
        raise ValueError(
            f"device_mapping is {device_mapping!r}, and has to be a list of integers: "
            "the IPU of each stage"
        )
    if any(ipu < 0 for ipu in device_mapping):
        raise ValueError(f"device_mapping is {device_mapping}, and no IPU has a negative number")
    return tuple(device_mapping)


def flag(value: Any, option: str) -> bool:
    """The checked value of an option that is on or off."""
    if not isinstance(value, bool):
        raise ValueError(f"{option} is {value!r}, and takes True or False")
    return value


def _notice_shardings(keywords: Mapping[str, Any], notices: MutableSet[str]) -> None:
    for name in _SHARDINGS:
        if keywords.get(name):
            notice(
                notices,
                name,
                f"{name}=True is kept without effect: updates of Keras' optimizers are not "
                "sharded over replicas yet",
            )
