"""Run the tasks of a schedule side by side, one thread per worker; stop all when one fails.

Threads live for one run only: between calls there is none, so a process may fork, and nothing is
left behind by a failure.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch

from ipu_dynamo.program.schedule.schedule import Schedule, Task
from ipu_dynamo.runtime.execute.timeline import Timeline

Work = Callable[[Task], None]


@dataclass
class _Progress:
    """What is done so far. Invariant: `done[call, replica]` micro-batches of a call are complete,
    and it only grows; after `error` is set, workers stop at their next task."""

    done: dict[tuple[int, int], int]
    changed: threading.Condition = field(default_factory=threading.Condition)
    error: BaseException | None = None

    def wait(self, replica: int, needed: list[tuple[int, int]]) -> bool:
        """Wait until the calls `needed` are done on their micro-batches; False: give up."""

        def ready() -> bool:
            return all(self.done[call, replica] > micro_batch for call, micro_batch in needed)

        if ready() and self.error is None:
            return True
        with self.changed:
            self.changed.wait_for(lambda: self.error is not None or ready())
            return self.error is None

    def finish(self, task: Task) -> None:
        with self.changed:
            self.done[task.call, task.replica] = task.micro_batch + 1
            self.changed.notify_all()

    def stop(self, error: BaseException) -> None:
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()


def run_side_by_side(
    schedule: Schedule,
    work: Work,
    *,
    threads_each: int,
    timeline: Timeline | None = None,
    in_turn: Work | None = None,
) -> None:
    """Run every task of `schedule`, each worker's in its order, after what they wait for.

    The calling thread is the first worker.

    Args:
        work: runs a task.
        threads_each: intra-op threads of each worker.
        timeline: records when each task ran.
        in_turn: what follows each task, in the order of micro-batches.

    Raises:
        The first error that a worker met, after all workers have stopped.
    """
    if len(schedule.workers) == 1 and timeline is None:
        for task in schedule.workers[0]:
            work(task)
            if in_turn is not None:
                in_turn(task)
        return
    replicas = {task.replica for tasks in schedule.workers for task in tasks}
    progress = _Progress({(c, r): 0 for c in range(len(schedule.calls)) for r in replicas})
    arguments = (schedule, work, progress, timeline, in_turn)
    others = [
        threading.Thread(
            target=_run_thread, args=(index, threads_each, *arguments), name=f"ipu worker {index}"
        )
        for index in range(1, len(schedule.workers))
    ]
    for thread in others:
        thread.start()
    try:
        _run_worker(0, *arguments)
    except BaseException as error:  # also Ctrl-C: the others must stop before it goes on
        progress.stop(error)
    for thread in others:
        _join(thread, progress)
    if progress.error is not None:
        raise progress.error


def _join(thread: threading.Thread, progress: _Progress) -> None:
    """Wait for a worker; an interrupt meanwhile stops it after its task."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:
            progress.stop(error)


def _run_thread(
    index: int,
    threads_each: int,
    schedule: Schedule,
    work: Work,
    progress: _Progress,
    timeline: Timeline | None,
    in_turn: Work | None,
) -> None:
    """A worker of its own thread: gradient mode and the number of threads are per thread."""
    torch.set_num_threads(threads_each)
    with torch.no_grad():
        try:
            _run_worker(index, schedule, work, progress, timeline, in_turn)
        except BaseException as error:  # kept for the caller, who raises it
            progress.stop(error)


def _run_worker(
    index: int,
    schedule: Schedule,
    work: Work,
    progress: _Progress,
    timeline: Timeline | None,
    in_turn: Work | None,
) -> None:
    for task in schedule.workers[index]:
        if not progress.wait(task.replica, schedule.needs(task)):
            return
        start = perf_counter()
        work(task)
        if timeline is not None:
            timeline.add(index, schedule.calls[task.call], task, start, perf_counter())
        if in_turn is not None:
            if not progress.wait(task.replica, [(task.call, task.micro_batch - 1)]):
                return
            in_turn(task)
        progress.finish(task)
