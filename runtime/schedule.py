"""Say which worker runs which call on which micro-batch, in which order: a plan that can be read,
drawn and checked before anything runs.

Source: PopTorch user guide, "poptorch.PipelinedExecution": in a training pipeline of F forward
stages micro-batch m is in slot t of its 2F - 1 slots in cycle m + t.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ipu_dynamo.errors import CompileError
from ipu_dynamo.program import Call
from ipu_dynamo.program.pipeline import slots


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """The `call`-th call of a micro-batch, on micro-batch `micro_batch` of its replica and step."""

    cycle: int
    call: int
    micro_batch: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tasks of every worker, each in the order in which the worker runs them.

    Args:
        calls: the calls of one micro-batch, in program order.
        workers: for each worker, its tasks.
        waits: for each call, the calls whose results it needs from another worker.
    """

    calls: tuple[Call, ...]
    workers: tuple[tuple[Task, ...], ...]
    waits: tuple[tuple[int, ...], ...]

    @property
    def cycles(self) -> int:
        """Pipeline cycles of a step, ramp-up and ramp-down included."""
        return 1 + max((task.cycle for tasks in self.workers for task in tasks), default=-1)

    def stash(self) -> dict[int, int]:
        """For each stage, how many micro-batches at most have values that it keeps for backward.

        A value made in cycle c and last read in cycle c' lives in c' - c + 1 copies.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            first.setdefault(call.stage, index)
            last[call.stage] = index
        cycle = {
            (task.call, task.micro_batch, task.replica): task.cycle
            for tasks in self.workers
            for task in tasks
        }
        alive: dict[int, int] = {}
        for stage, begin in first.items():
            spans = [
                (at, cycle[last[stage], m, r])
                for (call, m, r), at in cycle.items()
                if call == begin
            ]
            ends = sorted(at for _, at in spans)
            alive[stage] = max(
                sum(start <= now <= end for start, end in spans if end >= now) for now in ends
            )
        return alive

    def check(self) -> None:
        """Run the schedule without computing.

        Raises:
            CompileError: some tasks wait for each other; stage and value of one are named.
        """
        done: set[tuple[int, int, int]] = set()
        position = [0] * len(self.workers)
        moved = True
        while moved:
            moved = False
            for worker, tasks in enumerate(self.workers):
                while position[worker] < len(tasks):
                    task = tasks[position[worker]]
                    needed = self.waits[task.call]
                    if any((c, task.micro_batch, task.replica) not in done for c in needed):
                        break
                    done.add((task.call, task.micro_batch, task.replica))
                    position[worker] += 1
                    moved = True
        for worker, tasks in enumerate(self.workers):
            if position[worker] < len(tasks):
                task = tasks[position[worker]]
                call = self.calls[task.call]
                missing = next(
                    c
                    for c in self.waits[task.call]
                    if (c, task.micro_batch, task.replica) not in done
                )
                raise CompileError(
                    f"the schedule cannot finish: stage {call.stage} waits for "
                    f"@{self.calls[missing].function} of stage {self.calls[missing].stage} on "
                    f"micro-batch {task.micro_batch}, which never runs before it",
                    hint="use the sharded strategy, or another order of stages",
                )

    def __str__(self) -> str:
        """A row per worker, a column per cycle; `2` is forward, `2'` backward of micro-batch 2."""
        rows = []
        for worker, tasks in enumerate(self.workers):
            cells: dict[int, list[str]] = {}
            for task in tasks:
                call = self.calls[task.call]
                mark = {"forward": "", "backward": "'", "forward_backward": "*"}[call.direction]
                replica = f"r{task.replica}:" if task.replica else ""
                cells.setdefault(task.cycle, []).append(f"{replica}{task.micro_batch}{mark}")
            row = [" ".join(cells.get(cycle, ["."])) for cycle in range(self.cycles)]
            rows.append([f"worker {worker}", *row])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def in_turn(calls: Sequence[Call], *, micro_batches: int, replicas: int = 1) -> Schedule:
    """One worker runs all calls of a micro-batch, then the next micro-batch."""
    tasks, cycle = [], 0
    for micro_batch in range(micro_batches):
        for replica in range(replicas):
            for index in range(len(calls)):
                tasks.append(Task(cycle, index, micro_batch, replica))
                cycle += 1
    return Schedule(tuple(calls), (tuple(tasks),), ((),) * len(calls))


def pipelined(
    calls: Sequence[Call], *, micro_batches: int, replicas: int = 1, workers: int | None = None
) -> Schedule:
    """The pipelined schedule of one step.

    Args:
        calls: of one micro-batch, in program order.
        micro_batches: per replica and step.
        workers: at most so many; None is one for each IPU of every replica. IPUs of one worker
            take turns, and so do replicas.
    """
    ipus = sorted({call.ipu for call in calls})
    places = [(replica, ipu) for replica in range(replicas) for ipu in ipus]
    count = min(len(places), workers or len(places))
    worker_of = {place: index % count for index, place in enumerate(places)}
    when = slots(calls)
    tasks: list[list[Task]] = [[] for _ in range(count)]
    for replica in range(replicas):
        for micro_batch in range(micro_batches):
            for index, call in enumerate(calls):
                task = Task(micro_batch + when[index], index, micro_batch, replica)
                tasks[worker_of[replica, call.ipu]].append(task)
    schedule = Schedule(
        tuple(calls), tuple(tuple(sorted(of)) for of in tasks), tuple(_waits(calls))
    )
    schedule.check()
    return schedule


def _waits(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """For each call, the last call before it on every other IPU: with it all results are there."""
    waits = []
    for index, call in enumerate(calls):
        last = {c.ipu: i for i, c in enumerate(calls[:index]) if c.ipu != call.ipu}
        waits.append(tuple(sorted(last.values())))
    return waits
