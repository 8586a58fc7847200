"""Share the micro-batches of a step between workers, each the whole of some."""

from ipu_dynamo.program import Call
from ipu_dynamo.program.schedule.schedule import Schedule, Task


def side_by_side(call: Call, *, micro_batches: int, workers: int) -> Schedule:
    """Each worker takes every `workers`-th micro-batch, the whole of it."""
    count = min(workers, micro_batches)
    tasks = tuple(
        tuple(Task(m // count, 0, m) for m in range(worker, micro_batches, count))
        for worker in range(count)
    )
    return Schedule((call,), tasks, ((),))
