"""Schedule parallel phases: two groups of IPUs take turns, each on a micro-batch of its own.

Source: PopTorch user guide, "poptorch.ParallelPhasedExecution": even phases run on even IPUs while
odd ones run on odd IPUs. Micro-batch 2k is in phase p in cycle b + p, and 2k + 1 in cycle
b + p + 1, where b is the cycle in which the pair begins.
"""

from collections.abc import Sequence

from ipu_dynamo.program import Call
from ipu_dynamo.program.schedule.actions import RunPass
from ipu_dynamo.program.schedule.schedule import Schedule


def alternating(
    calls: Sequence[Call],
    waits: Sequence[tuple[int, ...]],
    *,
    micro_batches: int,
    replicas: int = 1,
    workers: int | None = None,
) -> Schedule:
    """The schedule of one step: two micro-batches of a replica at once, one phase apart.

    Args:
        calls: of one micro-batch, in program order, with their phases.
        waits: for each call, the earlier ones that must be done before it. The last call waits
            for all others, so that at most two micro-batches are under way.
        micro_batches: per replica and step.
        workers: at most so many; None is one for each IPU of every replica. IPUs of one worker
            take turns, and so do replicas.
    """
    places = [(r, ipu) for r in range(replicas) for ipu in sorted({call.ipu for call in calls})]
    count = min(len(places), workers or len(places))
    worker_of = {place: index % count for index, place in enumerate(places)}
    length = 1 + max(_phase(call) for call in calls)
    period = length + length % 2  # even, so that the next pair finds each group at its own phases
    runs: list[list[RunPass]] = [[] for _ in range(count)]
    for replica in range(replicas):
        for micro_batch in range(micro_batches):
            pair, second = divmod(micro_batch, 2)
            for index, call in enumerate(calls):
                cycle = pair * period + second + _phase(call)
                run = RunPass(cycle, index, micro_batch, replica)
                runs[worker_of[replica, call.ipu]].append(run)
    waits = [*waits[:-1], tuple(range(len(calls) - 1))]
    return Schedule.of_runs(calls, [sorted(of) for of in runs], waits)


def _phase(call: Call) -> int:
    assert call.phase is not None, "a phased schedule needs phases"
    return call.phase
