"""Plan the number of layers on each IPU by their times, measured on this machine."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from ipu_dynamo.optimum.config import IPUConfig, own_config
from ipu_dynamo.optimum.incompatible import IncompatibleIPUConfigError
from ipu_dynamo.optimum.placement.find_layers import LayerList, find_layer_lists
from ipu_dynamo.optimum.placement.traced_layers import (
    Sample,
    check_sample,
    in_order_of_calls,
    layer_seconds,
)
from ipu_dynamo.passes.traced.stages.even_cut import CutProblem, cut

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerPlan:
    """How layers are shared out.

    Args:
        layers_per_ipu: the number of layers of each IPU.
        seconds: the time of each IPU for a micro-batch, as far as it is known.
    """

    layers_per_ipu: list[int]
    seconds: tuple[float, ...]


def plan_layers(
    model: nn.Module,
    sample: Sample,
    n: int,
    ipu_config: IPUConfig,
    layers: str | Sequence[str] | None = None,
) -> LayerPlan:
    """The contiguous split of a model's layers over `n` IPUs whose slowest part is fastest.

    The times of operators are measured on this machine, forward and in training mode backward, too.
    The model and the configuration do not change.

    Args:
        model: has lists of layers.
        sample: arguments of a call with one micro-batch, a tuple or a dictionary.
        n: number of IPUs.
        ipu_config: by the mode, entries of a list of `n` are kept where they are not -1.
        layers: as for `parallelize`.

    Raises:
        IncompatibleIPUConfigError: the fixed entries are not those of the model.
        TypeError: `sample` is no tuple or dictionary.
        ValueError: fewer than one IPU, and as for `parallelize`.
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n={n!r} is no number of IPUs: it is an int from 1")
    if sample is None:
        raise TypeError("plan_layers measures a call: sample= is its arguments, and not None")
    check_sample(sample)
    lists = find_layer_lists(model, layers)
    if layers is None and len(lists) > 1:
        lists = in_order_of_calls(model, lists, sample)
    config = own_config(ipu_config)._plain()
    given = config._layers_per_ipu
    fixed = given if isinstance(given, list) and len(given) == n else [-1] * n
    return _plan(model, lists, sample, config, fixed)


def plan_for(
    model: nn.Module, lists: Sequence[LayerList], sample: Sample | None, config: IPUConfig
) -> LayerPlan:
    """The plan that "auto" asks for.

    Raises:
        ValueError: no sample, and the model has no `dummy_inputs`.
    """
    if sample is None:
        sample = getattr(model, "dummy_inputs", None)
    if not isinstance(sample, tuple | Mapping):
        name = config._get_managed_attr_mode_name("layers_per_ipu")
        raise ValueError(
            f'{name}="auto" measures a call: pass sample=, its arguments for one micro-batch as a '
            f"tuple or a dictionary (got {type(sample).__name__})"
        )
    return _plan(model, lists, sample, config, [-1] * config._ipus_per_replica)


def _plan(
    model: nn.Module,
    lists: Sequence[LayerList],
    sample: Sample,
    config: IPUConfig,
    fixed: Sequence[int],
) -> LayerPlan:
    seconds, before = layer_seconds(model, lists, sample, config, len(fixed))
    counts, times = balance(seconds, before, fixed)
    log.info("layers_per_ipu=%s, in ms: %s", counts, [round(1e3 * time, 3) for time in times])
    return LayerPlan(counts, times)


def balance(
    seconds: Sequence[float], before: float, fixed: Sequence[int]
) -> tuple[list[int], tuple[float, ...]]:
    """The number of layers of each IPU, and the time of each IPU.

    Args:
        seconds: of each layer; the last with all that follows it.
        before: the time of IPU 0 for other modules: embeddings, and heads tied to them.
        fixed: the number of layers of each IPU; -1 leaves it open.

    Raises:
        IncompatibleIPUConfigError: fixed entries that do not add up to the layers.
    """
    taken = [before, *[0.0] * (len(fixed) - 1)]
    sizes = [None if count == -1 else count for count in fixed]
    cuts = cut(CutProblem(list(seconds), taken=taken, sizes=sizes, may_be_empty=True), len(fixed))
    if cuts is None:
        total: Any = sum(count for count in fixed if count != -1)
        raise IncompatibleIPUConfigError(
            f"layers_per_ipu={list(fixed)} has {total} layers in its fixed entries, the model "
            f"{len(seconds)}"
        )
    edges = list(pairwise((0, *cuts, len(seconds))))
    times = (sum(seconds[a:b]) + more for (a, b), more in zip(edges, taken, strict=True))
    return [b - a for a, b in edges], tuple(times)
