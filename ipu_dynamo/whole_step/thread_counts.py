"""Decide how many threads run a program."""

import os

import torch

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.operator_costs import BYTES_PER_SECOND, estimated_seconds
from ipu_dynamo.options import Options
from ipu_dynamo.program import Program
from ipu_dynamo.program.schedule.planning import independent
from ipu_dynamo.program.schedule.stage_passes import stage_passes
from ipu_dynamo.runtime.lower.defer_accumulation import why_not_deferred

_WORTH_A_THREAD = 2e-4  # seconds of a stage's call, from which handing it over costs little
_WORTH_APART = 2e-3  # seconds of a micro-batch; a thread lives for one step and is started for it
# Of a micro-batch's time, which adding its gradients may take: in turn, products add themselves. A
# language model with a share of 0.13 took 1.14 times as long side by side on two cores.
_SMALL_SHARE = 0.05
_PASSES = 3  # over the memory of a gradient, when it is kept and added later


def threads_for(program: Program, options: Options) -> tuple[int, int | None]:
    """Threads that run IPUs side by side, and the intra-op threads of each.

    The second number decides the order of some sums, so it does not depend on the first.
    """
    if micro_batches_apart(program, options):
        return options.workers or torch.get_num_threads(), 1
    places = program.num_ipus * program.replicas
    if places == 1 and options.device_iterations > 1 and _on_cpu(program) and independent(program):
        return _spread(program, options)
    if options.strategy.kind not in ("pipelined", "parallel_phased") or places == 1:
        return 1, None
    intra_op = max(1, torch.get_num_threads() // places)
    if options.workers is not None:
        return options.workers, intra_op
    seconds = _seconds_of_turns(program)
    if sum(seconds) < _WORTH_A_THREAD * len(seconds):
        return 1, intra_op
    return min(places, _cores()), intra_op


def micro_batches_apart(program: Program, options: Options) -> bool:
    """Whether the micro-batches of a step run side by side, see `Options.side_by_side`.

    Like intra-op threads, this follows PyTorch's number of threads and not `workers`.

    Raises:
        CompileError: they are asked to, and cannot.
    """
    wanted = options.side_by_side
    several = program.kind == "training" and options.gradient_accumulation > 1
    if wanted is False or not several:
        return False
    if why_not_deferred(program) is not None:
        if wanted:
            raise CompileError(
                "micro-batches cannot run side by side: a step is more than one stage on one IPU "
                "of one replica, or changes other variables than sums of gradients, each once",
                hint="leave side_by_side out; running statistics of a batch norm, for instance, "
                "pass from one micro-batch to the next",
            )
        return False
    if wanted or torch.get_num_threads() == 1 or not _on_cpu(program):
        return bool(wanted)
    seconds = sum(_seconds_of_turns(program))
    held = sum(v.type.nbytes for v in program.variables if v.kind == "accumulator")
    adding = _PASSES * held / BYTES_PER_SECOND
    return seconds >= _WORTH_APART and adding <= _SMALL_SHARE * seconds


def _seconds_of_turns(program: Program) -> list[float]:
    of = {function.name: estimated_seconds(function.operators) for function in program.functions}
    return [sum(of[call.function] for call in turn) for turn in stage_passes(program.calls)]


def _on_cpu(program: Program) -> bool:
    inputs = (n for f in program.functions for n in f.graph.graph.find_nodes(op="placeholder"))
    return all(node.meta["val"].device.type == "cpu" for node in inputs)


def _spread(program: Program, options: Options) -> tuple[int, int]:
    """Device iterations of inference are shared by threads, rather than operators by threads:
    they wait for each other once a call, and not once an operator."""
    available = torch.get_num_threads()
    most = min(options.device_iterations, available)
    seconds = sum(_seconds_of_turns(program))
    workers = options.workers or (min(most, _cores()) if seconds > _WORTH_A_THREAD else 1)
    return min(workers, options.device_iterations), max(1, available // most)


def _cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
