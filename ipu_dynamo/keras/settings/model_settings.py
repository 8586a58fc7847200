"""Hold the options of one model as one value, which setters replace as a whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ipu_dynamo.keras.settings.enumerations import (
    GradientAccumulationReductionMethod,
    ReplicatedMetricReductionMethod,
)

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of a model's setters; each was checked when it was set.

    Args:
        accumulation_steps: micro-batches of a replica for each update, without a pipeline.
        pipelining_accumulation_steps: the same for a pipelined model.
        reduction: how the gradients of these micro-batches become one, in both cases.
        accumulation_keywords: the further keywords of `set_gradient_accumulation_options`.
        pipelining_keywords: those of `set_pipelining_options`; schedule and mode are members.
        device_mapping: the IPU of each stage within a replica.
        accumulate_outfeed: send results once for each update, and not for each micro-batch;
            None where it was never set.
        metric_reduction: how metrics of replicas become one.
        infeed_keywords: the keywords of `set_infeed_queue_options`.
        outfeed_keywords: those of `set_outfeed_queue_options`.
        asynchronous_callbacks: call callbacks for each step while the program runs.
    """

    accumulation_steps: int | None = None
    pipelining_accumulation_steps: int | None = None
    reduction: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM
    accumulation_keywords: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    pipelining_keywords: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    device_mapping: tuple[int, ...] | None = None
    accumulate_outfeed: bool | None = None
    metric_reduction: ReplicatedMetricReductionMethod = ReplicatedMetricReductionMethod.NONE
    infeed_keywords: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    outfeed_keywords: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    asynchronous_callbacks: bool = False
