"""Decide how many threads run a program."""

import os

import torch

from ipu_dynamo.options import Options
from ipu_dynamo.program import Program
from ipu_dynamo.program.turns import turns
from ipu_dynamo.program.work import estimated_seconds

_WORTH_A_THREAD = 2e-4  # seconds of a stage's call, from which handing it over costs little


def threads_for(program: Program, options: Options) -> tuple[int, int | None]:
    """Threads that run IPUs side by side, and the intra-op threads of each.

    The second number decides the order of some sums, so it does not depend on the first.
    """
    places = program.num_ipus * program.replicas
    if options.strategy.kind not in ("pipelined", "parallel_phased") or places == 1:
        return 1, None
    intra_op = max(1, torch.get_num_threads() // places)
    if options.workers is not None:
        return options.workers, intra_op
    of = {function.name: estimated_seconds(function.operators) for function in program.functions}
    seconds = [sum(of[call.function] for call in turn) for turn in turns(program.calls)]
    if sum(seconds) < _WORTH_A_THREAD * len(seconds):
        return 1, intra_op
    return min(places, _cores()), intra_op


def _cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
