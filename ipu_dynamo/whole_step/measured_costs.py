"""Find out once what a model's operators take here, so that it can be cut into equal stages."""

import json
import logging
from dataclasses import replace
from hashlib import sha256

import torch

from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.options import Costs, Options
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.pipeline import joint_passes, left_out, traced_passes
from ipu_dynamo.passes.traced.stages.auto_partition import costs_of, one_stage_each
from ipu_dynamo.program.ir.function import structural_key
from ipu_dynamo.progress import begin
from ipu_dynamo.runtime.engines.engines import make_engine
from ipu_dynamo.runtime.engines.stage_key import this_machine
from ipu_dynamo.tune.artifact_store import open_store
from ipu_dynamo.tune.operator_times import operator_times

log = logging.getLogger(__name__)
_known: dict[str, Costs] = {}  # what this process has measured or read, by key


def with_costs(capture: Capture, options: Options, *, loss: int | None) -> Options:
    """`options` with what every operator takes, if the strategy is to cut the model by that.

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


def measured_costs(capture: Capture, options: Options, *, loss: int | None) -> Costs:
    """Seconds of each operator, forward and backward: measured, or what was measured before."""
    alone = replace(options, recompute="off", recompute_budget=None)
    apart = one_stage_each(capture)
    steps = [
        *traced_passes(alone, training=capture.training, loss=loss, warn=False),
        *joint_passes(alone),
    ]
    PassManager("costs").run(left_out(steps, alone), apart)
    fused = make_engine(options.stage_engine).name == "inductor"
    threads = max(1, torch.get_num_threads() // (options.strategy.ipus or 1))
    stages = [node.meta.get("ipu.stage") for node in apart.graph.graph.nodes]
    parts = structural_key(apart.graph), stages, fused, threads, this_machine()
    key = sha256(repr(parts).encode()).hexdigest()
    if key not in _known:
        _known[key] = _read(key) or _measure(key, apart, threads=threads, fused=fused)
    return _known[key]


def _measure(key: str, apart: Capture, *, threads: int, fused: bool) -> Costs:
    begin("measuring")
    seconds = operator_times(apart.graph, threads=threads, fused=fused)
    costs = costs_of(apart, lambda node: seconds.get(node, 0.0))
    if store := open_store():
        try:
            store.write_note(key, json.dumps(costs))
        except OSError as error:  # a full disk: what was measured serves this process
            log.warning("measured costs cannot be kept in %s: %s", store.folder, error)
    return costs


def _read(key: str) -> Costs | None:
    store = open_store()
    text = store.read_note(key) if store else None
    if text is None:
        return None
    return tuple((float(forward), float(backward)) for forward, backward in json.loads(text))
