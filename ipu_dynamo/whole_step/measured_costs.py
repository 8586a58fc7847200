"""Measure a model's operators once on this machine, to cut the model into equal stages.

If results cannot be kept, nothing is measured: another process would cut the model otherwise.
"""

import logging
from dataclasses import replace
from functools import partial

import torch

from ipu_dynamo.capture.capture import Joint, Traced
from ipu_dynamo.ops.operator_costs import seconds as estimated_seconds
from ipu_dynamo.options import Costs, Options
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.pipeline import joint_passes, left_out, traced_passes
from ipu_dynamo.passes.traced.stages.auto_partition import costs_of, one_stage_each
from ipu_dynamo.program.ir.function import structural_key
from ipu_dynamo.progress import begin
from ipu_dynamo.runtime.engines.engines import make_engine
from ipu_dynamo.runtime.engines.stage_key import this_machine
from ipu_dynamo.tune.autotune_cache import Seconds, kept_figures
from ipu_dynamo.tune.operator_times import operator_times

log = logging.getLogger(__name__)
_DIRECTIONS = ("forward", "backward")


def with_costs(capture: Traced, options: Options, *, loss: int | None) -> Options:
    """`options` with the seconds of every operator, if the strategy cuts the model by them.

    Args:
        capture: fresh from tracing; left as it is.
        loss: as for `pipeline`.
    """
    strategy = options.strategy
    if strategy.ipus is None or strategy.costs:
        return options
    costs = measured_costs(capture, options, loss=loss)
    log.debug("operators take %s s", costs)
    return replace(options, strategy=replace(strategy, costs=costs))


def measured_costs(capture: Traced, options: Options, *, loss: int | None) -> Costs:
    """Seconds of each operator, forward and backward: measured now or before.

    They are estimated if no folder keeps measurements.
    """
    alone = replace(options, recompute="off", recompute_budget=None)
    steps = [
        *traced_passes(alone, training=capture.training, loss=loss, warn=False),
        *joint_passes(alone),
    ]
    one_each = PassManager("costs").run(left_out(steps, alone), one_stage_each(capture))
    assert isinstance(one_each, Joint), "the last passes are of joint graphs"
    fused = make_engine(options.stage_engine).name == "inductor"
    threads = max(1, torch.get_num_threads() // (options.strategy.ipus or 1))
    stages = [node.meta.get("ipu.stage") for node in one_each.graph.graph.nodes]
    parts = structural_key(one_each.graph), stages, fused, threads, this_machine()
    measure = partial(_measure, one_each, threads=threads, fused=fused)
    figures = kept_figures("operators", repr(parts), _DIRECTIONS, measure)
    return _read(figures) if figures else costs_of(one_each, estimated_seconds)


def _measure(one_each: Joint, *, threads: int, fused: bool) -> Seconds:
    begin("measuring")
    seconds = operator_times(one_each.graph, threads=threads, fused=fused)
    costs = costs_of(one_each, lambda node: seconds.get(node, 0.0))
    return {
        direction: {str(index): pair[place] for index, pair in enumerate(costs)}
        for place, direction in enumerate(_DIRECTIONS)
    }


def _read(figures: Seconds) -> Costs:
    forward, backward = (figures[direction] for direction in _DIRECTIONS)
    return tuple((forward[str(i)], backward[str(i)]) for i in range(len(forward)))
