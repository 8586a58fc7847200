"""Make schedules for the micro-batches of a step.

Source: PopTorch user guide, "poptorch.PipelinedExecution"; `pipeline_clock.py` has the slots of a
pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

from ipu_dynamo.ops.graph_queries import draws as draws_numbers
from ipu_dynamo.ops.library.host_call import calls_host
from ipu_dynamo.ops.marks.print_tensor import print_tensor_op
from ipu_dynamo.program import Call, Program
from ipu_dynamo.program.schedule.actions import (
    Action,
    AddGradients,
    ReceiveValues,
    RunPass,
    SendValues,
    Transfer,
)
from ipu_dynamo.program.schedule.dependencies import (
    changed_variables,
    changes_between_calls,
    dependencies,
)
from ipu_dynamo.program.schedule.estimated_times import on_cpu, repeating_passes
from ipu_dynamo.program.schedule.phased_schedule import alternating
from ipu_dynamo.program.schedule.pipeline_clock import waits_of
from ipu_dynamo.program.schedule.pipeline_orders import runs_of_workers
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import (
    NO_EXCHANGES,
    Exchanges,
    StagePass,
    calls_of_passes,
    exchanges_of_passes,
)
from ipu_dynamo.program.share import Share


def schedule_of(
    program: Program,
    *,
    micro_batches: int,
    replicas: int,
    workers: int | None,
    share: Share | None = None,
) -> Schedule:
    """How a program's micro-batches run on this many workers.

    Args:
        micro_batches: per replica, between two updates.
        workers: as for `pipelined`. One worker runs micro-batch by micro-batch, and so does a
            program of several IPUs that is no pipeline. An IPU that is alone shares its
            micro-batches between the workers when they are `independent`.
        share: plan for ranks, one of which has this share. Replicas are those of one row of ranks
            if they exchange nothing within micro-batches, else all.
    """
    schedule = _plan(program, micro_batches, replicas, workers, share)
    repeats = repeating_passes(program)
    passes = (
        replace(one, repeats=again) for one, again in zip(schedule.passes, repeats, strict=True)
    )
    return replace(schedule, passes=tuple(passes))


def _plan(
    program: Program, micro_batches: int, replicas: int, workers: int | None, share: Share | None
) -> Schedule:
    loop = sections(program).loop
    calls, exchanges = calls_of_passes(loop), exchanges_of_passes(loop)
    one_by_one = partial(
        sequential, calls, micro_batches=micro_batches, replicas=replicas, exchanges=exchanges
    )
    alone = len({call.ipu for call in calls}) == 1
    if share is not None and crosses(program, share):
        rows = share.rows if exchanges else 1
        several = program.order == "pipelined" or alone
        plan = partial(pipelined, schedule=program.schedule) if several else sequential_on_ranks
        worker_of = workers_of_ranks(
            program.num_ipus, replicas, Share(rows, share.columns, 0, 0), workers if several else 1
        )
        return plan(
            calls,
            micro_batches=micro_batches,
            replicas=replicas,
            exchanges=exchanges,
            worker_of=worker_of,
        )
    if alone and replicas == 1 and workers is not None and independent(program):
        return spread(calls, micro_batches=micro_batches, workers=workers)
    if workers == 1 or (alone and replicas == 1):
        return one_by_one()
    if any(call.phase is not None for call in calls):
        if changes_between_calls(program):  # the last call writes for the next micro-batch
            return one_by_one()
        return alternating(
            calls,
            dependencies(program),
            micro_batches=micro_batches,
            replicas=replicas,
            workers=workers,
        )
    if not alone and program.order == "sequential":
        return one_by_one()
    return pipelined(
        calls,
        micro_batches=micro_batches,
        replicas=replicas,
        workers=workers,
        exchanges=exchanges,
        schedule=program.schedule,
    )


def sequential(
    calls: Sequence[Call],
    *,
    micro_batches: int,
    replicas: int = 1,
    exchanges: Exchanges = NO_EXCHANGES,
) -> Schedule:
    """One worker runs all calls of a micro-batch, then the next micro-batch.

    It runs replica by replica, up to where these exchange values.
    """
    runs, cycle = [], 0
    stretches = [range(*pair) for pair in pairwise([0, *sorted(exchanges), len(calls)])]
    for micro_batch, stretch in product(range(micro_batches), stretches):
        for replica, index in product(range(replicas), stretch):
            runs.append(RunPass(cycle, index, micro_batch, replica))
            cycle += 1
    return Schedule(tuple(map(StagePass.of, calls)), (tuple(runs),))


def crosses(program: Program, share: Share) -> bool:
    """Whether ranks send each other values within a micro-batch."""
    exchanges = exchanges_of_passes(sections(program).loop)
    return share.columns > 1 or (share.rows > 1 and bool(exchanges))


def workers_of_ranks(
    ipus: int, replicas: int, share: Share, workers: int | None
) -> dict[tuple[int, int], int]:
    """The worker of each replica and IPU: those of a worker are of one rank.

    Args:
        workers: of each rank, at most; None is one for each IPU of every replica.
    """
    worker_of: dict[tuple[int, int], int] = {}
    first = 0
    for rank in range(share.ranks):
        of = share.of_rank(rank)
        places = [*product(of.replicas(replicas), of.ipus(ipus))]
        count = min(len(places), workers or len(places))
        worker_of |= {place: first + index % count for index, place in enumerate(places)}
        first += count
    return worker_of


def sequential_on_ranks(
    calls: Sequence[Call],
    *,
    micro_batches: int,
    replicas: int,
    exchanges: Exchanges,
    worker_of: Mapping[tuple[int, int], int],
) -> Schedule:
    """Each worker runs its calls of a micro-batch, then those of the next one."""
    runs: list[list[RunPass]] = [[] for _ in range(max(worker_of.values()) + 1)]
    whole = sequential(calls, micro_batches=micro_batches, replicas=replicas, exchanges=exchanges)
    for run in whole.runs[0]:
        runs[worker_of[run.replica, calls[run.index].ipu]].append(run)
    return Schedule.of_runs(calls, runs, waits_of(calls), _unbounded_readers(calls), exchanges)


def independent(program: Program) -> bool:
    """Whether micro-batches do not depend on each other, so that they may run at once."""
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
    return any(draws_numbers(node) for function in program.functions for node in function.operators)


def prints(program: Program) -> bool:
    """Whether functions print, in the order in which they are called."""
    return any(
        node.target is print_tensor_op
        for function in program.functions
        for node in function.operators
    )


def spread(calls: Sequence[Call], *, micro_batches: int, workers: int) -> Schedule:
    """Each worker runs all calls of some consecutive micro-batches, without waiting."""
    count = min(workers, micro_batches)
    ends = [micro_batches * (worker + 1) // count for worker in range(count)]
    runs = []
    for start, end in pairwise([0, *ends]):
        order = [(m, index) for m in range(start, end) for index in range(len(calls))]
        runs.append(tuple(RunPass(cycle, index, m) for cycle, (m, index) in enumerate(order)))
    return Schedule(tuple(map(StagePass.of, calls)), tuple(runs))


def side_by_side(call: Call, sums: Sequence[str], *, micro_batches: int, workers: int) -> Schedule:
    """Each worker takes every `workers`-th micro-batch, the whole of it.

    Actions add the gradients of each micro-batch after those of the one before.

    Args:
        call: of the one stage pass.
        sums: the variables that gradients are added to.
    """
    count = min(workers, micro_batches)
    actions: list[list[Action]] = [[] for _ in range(count)]
    for micro_batch in range(micro_batches):
        own = actions[micro_batch % count]
        own.append(RunPass(micro_batch // count, 0, micro_batch))
        if count > 1 and micro_batch > 0:
            own.append(ReceiveValues(0, micro_batch - 1))
        own.append(AddGradients(micro_batch))
        if count > 1 and micro_batch + 1 < micro_batches:
            own.append(SendValues(0, micro_batch))
    handed_on = (Transfer(0, 0, tuple(dict.fromkeys(sums))),) if count > 1 else ()
    return Schedule((StagePass.of(call),), tuple(map(tuple, actions)), handed_on)


def pipelined(
    calls: Sequence[Call],
    *,
    micro_batches: int,
    replicas: int = 1,
    workers: int | None = None,
    exchanges: Exchanges = NO_EXCHANGES,
    worker_of: Mapping[tuple[int, int], int] | None = None,
    schedule: str = "",
) -> Schedule:
    """The pipelined schedule of one step.

    Args:
        calls: of one micro-batch, in program order.
        micro_batches: per replica and step.
        workers: at most so many; None is one for each IPU of every replica. IPUs of one worker
            take turns, and so do replicas.
        exchanges: the values that replicas exchange between calls.
        worker_of: the worker of each replica and IPU; None: all places are dealt in turn.
        schedule: its name; "" is the order of slots.
    """
    if worker_of is None:
        ipus = sorted({call.ipu for call in calls})
        places = [(replica, ipu) for replica in range(replicas) for ipu in ipus]
        count = min(len(places), workers or len(places))
        worker_of = {place: index % count for index, place in enumerate(places)}
    waits = waits_of(calls)
    runs = runs_of_workers(calls, waits, worker_of, schedule=schedule, micro_batches=micro_batches)
    return Schedule.of_runs(calls, runs, waits, _unbounded_readers(calls), exchanges)


def _unbounded_readers(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """For each call, the next one on another IPU. Without backward passes, nothing else keeps a
    call from running ahead of its readers. With them no call waits for readers."""
    if any("backward" in call.direction for call in calls):
        return []
    readers = []
    for index, call in enumerate(calls):
        later = [i for i, c in enumerate(calls[index:], index) if c.ipu != call.ipu]
        readers.append(tuple(later[:1]))
    return readers
