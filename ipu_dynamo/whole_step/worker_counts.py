"""Decide how many workers run a host program: no result depends on it."""

import os

import torch

from ipu_dynamo.options import Options
from ipu_dynamo.program import HostProgram
from ipu_dynamo.program.schedule.estimated_times import seconds_of_passes
from ipu_dynamo.program.schedule.planning import is_spread
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.tune.costs import WORTH_A_WORKER


def workers_for(host: HostProgram, options: Options) -> int:
    """Threads that run IPUs, micro-batches or device iterations side by side."""
    if host.deferred is not None:
        return options.workers or torch.get_num_threads()
    program = host.inlined
    if is_spread(program):
        return _spread(host, options)
    places = program.num_ipus * program.replicas
    sharded = options.strategy.kind == "pipelined" and program.order == "sequential"
    if not options.strategy.several_at_once or sharded or places == 1:
        return 1
    if options.workers is not None:
        return options.workers
    seconds = seconds_of_passes(program)
    if sum(seconds) < WORTH_A_WORKER * len(seconds):
        return 1
    return min(places, _cores())


def _spread(host: HostProgram, options: Options) -> int:
    """Workers that share the device iterations of inference."""
    iterations = sections(host.inlined).micro_batches
    most = min(iterations, torch.get_num_threads())
    seconds = sum(seconds_of_passes(host.inlined))
    workers = options.workers or (min(most, _cores()) if seconds > WORTH_A_WORKER else 1)
    return min(workers, iterations)


def _cores() -> int:
    """Processor cores for this process: all ranks of a computer see all of its cores."""
    seen = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        seen = len(os.sched_getaffinity(0))
    return max(1, seen // _ranks_here())


def _ranks_here() -> int:
    """How many ranks run on this computer: torchrun says so."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said)) if said.isdecimal() else 1
