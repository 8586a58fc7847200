"""List every keyword of the setters other than their arguments: values, effect, refusals.

The guide's table of options is made from these lists.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from ipu_dynamo.keras.settings.enumerations import PipelineSchedule, RecomputationMode

RECORDED = "recorded: kept, without effect"


@dataclass(frozen=True, slots=True)
class Keyword:
    """A keyword: its values, its effect, and a function that checks and normalises a value.

    `read(value, keyword)` raises `ValueError` for a value that the keyword does not take.
    """

    values: str
    effect: str
    read: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class KeywordTable:
    """The keywords of one setter, and the reasons why it refuses others.

    Args:
        named: the parameters that its signature has, which near names are looked for in, too.
    """

    setter: str
    known: Mapping[str, Keyword]
    refused: Mapping[str, str]
    named: tuple[str, ...] = ()

    def check(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The checked keywords.

        Raises:
            ValueError: a refused keyword, or a value that its keyword does not take.
            TypeError: an unknown keyword.
        """
        for name in keywords:
            if name in self.refused:
                raise ValueError(f"{self.setter} does not take {name}: {self.refused[name]}")
            if name not in self.known:
                valid = [*self.named, *self.known]
                names = " or ".join(get_close_matches(name, valid, n=2)) or ", ".join(valid)
                raise TypeError(f"{self.setter} does not know {name}; try {names}")
        return {name: self.known[name].read(value, name) for name, value in keywords.items()}


def _anything(value: Any, keyword: str) -> Any:
    return value


def _flag(value: Any, keyword: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise ValueError(f"{keyword} is {value!r}, and takes None, True or False")


def _depth(value: Any, keyword: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(f"{keyword} is {value!r}, and has to be a positive integer")


def _schedule(value: Any, keyword: str) -> PipelineSchedule:
    return PipelineSchedule.Grouped if value is None else PipelineSchedule.parse(value, keyword)


def _recomputation(value: Any, keyword: str) -> RecomputationMode:
    return RecomputationMode.Auto if value is None else RecomputationMode.parse(value, keyword)


def _accumulator_dtype(value: Any, keyword: str) -> Any:
    """None, a dtype of torch, or the function itself, whose answers `as_dtype` reads."""
    if callable(value) and not isinstance(value, type):
        return value
    return as_dtype(value, keyword)


def as_dtype(value: Any, keyword: str) -> torch.dtype | None:
    """The dtype of torch that `value` is or names; None stays None."""
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if dtype is None and value is None:
        return None
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise ValueError(
        f"{keyword} is {value!r}, and takes None, a floating dtype of torch, its name, "
        "or a function of the variable that gives one"
    )


def _not_continuous(value: Any, keyword: str) -> bool:
    if value is False:
        return False
    if value is True:
        raise NotImplementedError(
            f"{keyword}=True is not offered: weights change once for each gradient accumulation; "
            f"leave {keyword} out"
        )
    raise ValueError(f"{keyword} is {value!r}, and takes True or False")


_DTYPE = Keyword(
    "None, a dtype of torch or its name, a function of the variable",
    "dtype of the accumulators, and of the gradients that the update gets; None: float32, or the "
    "variable's if that is wider",
    _accumulator_dtype,
)
_STATE_OFF_CHIP = Keyword("None, bool", "True: optimizer state lives off chip", _flag)
_SHARDING = Keyword(
    "None, bool", "recorded; True says once that updates are not sharded yet", _flag
)
_IGNORED = Keyword("any", RECORDED, _anything)

ACCUMULATION = KeywordTable(
    "set_gradient_accumulation_options",
    named=(
        "gradient_accumulation_steps_per_replica",
        "gradient_accumulation_reduction_method",
        "use_v2_gradient_accumulation_optimizer",
    ),
    known={
        "dtype": _DTYPE,
        "offload_weight_update_variables": _STATE_OFF_CHIP,
        "replicated_optimizer_state_sharding": _SHARDING,
        "name": _IGNORED,
    },
    refused={
        "opt": "the optimizer is automatically that of compile(); give it there",
        "num_mini_batches": "use gradient_accumulation_steps_per_replica",
        "experimental_normalize_gradients": "use gradient_accumulation_reduction_method",
    },
)

_AUTOMATIC = "it is automatically set by Keras; leave it out"
_INCOMPATIBLE = "it is not compatible with Keras; leave it out"

PIPELINING = KeywordTable(
    "set_pipelining_options",
    named=(
        "gradient_accumulation_steps_per_replica",
        "device_mapping",
        "accumulate_outfeed",
        "gradient_accumulation_reduction_method",
    ),
    known={
        "pipeline_schedule": Keyword(
            "None (Grouped), a PipelineSchedule or its name",
            "Grouped and Interleaved: the stages work at the same time. Sequential: one "
            "micro-batch after the other, of any number; accumulation that is not set counts as 1",
            _schedule,
        ),
        "recomputation_mode": Keyword(
            "None (Auto), a RecomputationMode or its name",
            "forward values that are computed again in backward: as the compiler chooses, those "
            "within a stage, or all",
            _recomputation,
        ),
        "gradient_accumulation_dtype": _DTYPE,
        "offload_weights": Keyword("None, bool", "True: weights live off chip", _flag),
        "offload_weight_update_variables": _STATE_OFF_CHIP,
        "offload_gradient_accumulation_buffers": Keyword(
            "None, bool", "True: accumulators live off chip", _flag
        ),
        "replicated_optimizer_state_sharding": _SHARDING,
        "replicated_weight_sharding": _SHARDING,
        "continuous_weight_updates": Keyword(
            "bool", "True is refused: weights change once for each accumulation", _not_continuous
        ),
        "offload_activations": _IGNORED,
        "accumulate_outfeed_dtype": _IGNORED,
        "gradient_accumulation_for_captured_grads": _IGNORED,
        "forward_propagation_stages_poplar_options": _IGNORED,
        "backward_propagation_stages_poplar_options": _IGNORED,
        "weight_update_poplar_options": _IGNORED,
        "optimise_latency": _IGNORED,
        "name": _IGNORED,
    },
    refused={
        "gradient_accumulation_count": "use gradient_accumulation_steps_per_replica",
        "computational_stages": _AUTOMATIC,
        "repeat_count": _AUTOMATIC,
        "inputs": _AUTOMATIC,
        "infeed_queue": _AUTOMATIC,
        "outfeed_queue": _AUTOMATIC,
        "optimizer_function": _AUTOMATIC,
        "outfeed_loss": _INCOMPATIBLE,
        "outfeed_mask": _INCOMPATIBLE,
        "batch_serialization_iterations": _INCOMPATIBLE,
        "experimental_normalize_gradients": "use gradient_accumulation_reduction_method",
        "reduction_method": "use gradient_accumulation_reduction_method",
    },
)

INFEED = KeywordTable(
    "set_infeed_queue_options",
    known={
        "prefetch_depth": Keyword(
            "int, at least 1; 1 unless set", "how many calls' batches are read ahead", _depth
        ),
        "optimise_latency": _IGNORED,
    },
    refused={
        "dataset": _AUTOMATIC,
        "infeed_spec": _AUTOMATIC,
        "element_spec": _AUTOMATIC,
        "_internal_id": _INCOMPATIBLE,
    },
)

OUTFEED = KeywordTable(
    "set_outfeed_queue_options",
    known={
        "buffer_depth": Keyword(
            "int, at least 1; 1 unless set", "how many calls' results wait for their reader", _depth
        ),
        "optimise_latency": _IGNORED,
    },
    refused={"outfeed_mode": _AUTOMATIC, "device_ordinal": _AUTOMATIC},
)

TABLES = (ACCUMULATION, PIPELINING, INFEED, OUTFEED)
