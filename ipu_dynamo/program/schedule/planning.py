"""Make schedules for the micro-batches of a step.

Source: PopTorch user guide, "poptorch.PipelinedExecution"; `pipeline_clock.py` has the slots of a
pipeline.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import fx

from ipu_dynamo.ops.library.host_call import calls_host
from ipu_dynamo.ops.marks.print_tensor import print_tensor_op
from ipu_dynamo.program import Call, Program, Stash
from ipu_dynamo.program.schedule.dependencies import (
    changed_variables,
    changes_between_calls,
    dependencies,
)
from ipu_dynamo.program.schedule.estimated_times import on_cpu
from ipu_dynamo.program.schedule.phased_schedule import alternating
from ipu_dynamo.program.schedule.pipeline_clock import slots, slots_left
from ipu_dynamo.program.schedule.schedule import Schedule, Task
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import as_call, stage_passes


def schedule_of(
    program: Program, *, micro_batches: int, replicas: int, workers: int | None
) -> Schedule:
    """How a program's micro-batches run on this many workers.

    Args:
        micro_batches: per replica, between two updates.
        workers: as for `pipelined`. One worker runs micro-batch by micro-batch, and so does a
            program of several IPUs that is no pipeline. An IPU that is alone shares its
            micro-batches between the workers when they are `independent`.
    """
    calls = [as_call(calls) for calls in stage_passes(program.calls)]
    alone = len({call.ipu for call in calls}) == 1
    if alone and replicas == 1 and workers is not None and independent(program):
        return spread(calls, micro_batches=micro_batches, workers=workers)
    if workers == 1 or (alone and replicas == 1):
        return sequential(calls, micro_batches=micro_batches, replicas=replicas)
    if any(call.phase is not None for call in calls):
        if changes_between_calls(program):  # the next micro-batch needs what the last call leaves
            return sequential(calls, micro_batches=micro_batches, replicas=replicas)
        return alternating(
            calls,
            dependencies(program),
            micro_batches=micro_batches,
            replicas=replicas,
            workers=workers,
        )
    if not alone and program.order == "sequential":
        return sequential(calls, micro_batches=micro_batches, replicas=replicas)
    return pipelined(
        calls,
        micro_batches=micro_batches,
        replicas=replicas,
        workers=workers,
        stashes=program.stash,
    )


def sequential(calls: Sequence[Call], *, micro_batches: int, replicas: int = 1) -> Schedule:
    """One worker runs all calls of a micro-batch, then the next micro-batch."""
    tasks, cycle = [], 0
    for micro_batch in range(micro_batches):
        for replica in range(replicas):
            for index in range(len(calls)):
                tasks.append(Task(cycle, index, micro_batch, replica))
                cycle += 1
    return Schedule(tuple(calls), (tuple(tasks),), ((),) * len(calls))


def independent(program: Program) -> bool:
    """Whether micro-batches leave nothing behind for each other, so that they may run at once."""
    if program.kind != "inference" or changed_variables(program) or draws(program):
        return False
    return not any(
        calls_host(node) for function in program.functions for node in function.operators
    )


def is_spread(program: Program) -> bool:
    """Whether workers share micro-batches of one IPU, each the whole of some."""
    alone = program.num_ipus * program.replicas == 1
    several = sections(program).micro_batches > 1
    return alone and several and on_cpu(program) and independent(program)


def draws(program: Program) -> bool:
    """Whether it takes numbers from torch's generator, so that the order of its calls matters."""
    return any(_draws(node) for function in program.functions for node in function.operators)


def prints(program: Program) -> bool:
    """Whether functions print, in the order in which they are called."""
    return any(
        node.target is print_tensor_op
        for function in program.functions
        for node in function.operators
    )


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = node.target._schema  # type: ignore[union-attr]
    places = [i for i, argument in enumerate(schema.arguments) if argument.name == "dropout_p"]
    if not places:
        return True
    probability = node.args[places[0] :] or (node.kwargs.get("dropout_p", 0.0),)
    return bool(probability[0] != 0.0)  # attention without dropout


def spread(calls: Sequence[Call], *, micro_batches: int, workers: int) -> Schedule:
    """Each worker runs all calls of some consecutive micro-batches, and waits for nobody."""
    count = min(workers, micro_batches)
    ends = [micro_batches * (worker + 1) // count for worker in range(count)]
    tasks = []
    for start, end in pairwise([0, *ends]):
        order = [(m, index) for m in range(start, end) for index in range(len(calls))]
        tasks.append(tuple(Task(cycle, index, m) for cycle, (m, index) in enumerate(order)))
    return Schedule(tuple(calls), tuple(tasks), ((),) * len(calls))


def pipelined(
    calls: Sequence[Call],
    *,
    micro_batches: int,
    replicas: int = 1,
    workers: int | None = None,
    stashes: Sequence[Stash] = (),
) -> Schedule:
    """The pipelined schedule of one step.

    Args:
        calls: of one micro-batch, in program order.
        micro_batches: per replica and step.
        workers: at most so many; None is one for each IPU of every replica. IPUs of one worker
            take turns, and so do replicas.
        stashes: how much the stages may keep.

    Raises:
        CompileError: the schedule cannot run.
    """
    ipus = sorted({call.ipu for call in calls})
    places = [(replica, ipu) for replica in range(replicas) for ipu in ipus]
    count = min(len(places), workers or len(places))
    worker_of = {place: index % count for index, place in enumerate(places)}
    when, left = slots(calls), slots_left(calls)
    ends = [0] * count  # the cycle in which each worker has done what others may wait for
    for (_, ipu), worker in worker_of.items():
        ends[worker] = max(ends[worker], micro_batches - 1 + max(when) - left[ipu])
    tasks: list[list[Task]] = [[] for _ in range(count)]
    for replica in range(replicas):
        for micro_batch in range(micro_batches):
            for index, call in enumerate(calls):
                worker, cycle = worker_of[replica, call.ipu], micro_batch + when[index]
                after = micro_batches - 1 - micro_batch  # so many micro-batches come after it
                if call.direction == "weights" and after <= left[call.ipu]:
                    cycle = ends[worker]
                tasks[worker].append(Task(cycle, index, micro_batch, replica))

    def turn(task: Task) -> tuple[int, bool, Task]:
        return task.cycle, calls[task.call].direction == "weights", task

    ordered = tuple(tuple(sorted(of, key=turn)) for of in tasks)
    training = any("backward" in call.direction for call in calls)
    readers = () if training else tuple(_readers(calls))
    schedule = Schedule(tuple(calls), ordered, tuple(_waits(calls)), (*stashes,), readers)
    schedule.check()
    return schedule


def _waits(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """For each call, the last call before it on every other IPU: with it all results are there.

    Nobody waits for weight gradients, and what they need is on their own IPU.
    """
    waits: list[tuple[int, ...]] = []
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        weights = call.direction == "weights"
        waits.append(
            () if weights else tuple(sorted(i for ipu, i in last.items() if ipu != call.ipu))
        )
        if not weights:
            last[call.ipu] = index
    return waits


def _readers(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """For each call, the next one on another IPU, ahead of which it must not run by more than a
    pipeline does: where no backward pass follows, nothing else would stop it."""
    readers = []
    for index, call in enumerate(calls):
        later = [i for i, c in enumerate(calls[index:], index) if c.ipu != call.ipu]
        readers.append(tuple(later[:1]))
    return readers
