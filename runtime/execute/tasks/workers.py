"""Run the tasks of a schedule side by side, one thread per worker; stop all when one fails.

Threads live for one run only: between calls there is none, so a process may fork, and nothing is
left behind by a failure or an interrupt, whenever it comes.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, sleep

import torch

from ipu_dynamo.ops.private.locks import caller, work_for
from ipu_dynamo.program.schedule.schedule import Schedule, Task
from ipu_dynamo.runtime.execute.tasks.changes import Changes
from ipu_dynamo.tune.intra_op import set_intra_op_threads

Work = Callable[[int, Task], None]  # a worker runs a task
After = Callable[[Task], None]
_LOST = "a worker's thread ended before its tasks"
_NO_THREAD = "can't start new thread"  # says Python when there is none
_UNLOCKED = "release unlocked lock"  # says a condition whose wait was interrupted as it ended
_LOOK = 1.0  # seconds after which a worker that waits looks whether the others are still there
_START = 0.5  # seconds in which a thread begins whose start was interrupted, if it does at all


class Reports:
    """Reports complete micro-batches to the calling thread.

    Invariant: `_left` has the tasks of those that have begun, and are not complete.

    Args:
        tell: is called with each micro-batch, in order.
        tasks: of a micro-batch.
    """

    def __init__(self, tell: Callable[[int], None], tasks: int) -> None:
        self._tell, self._tasks = tell, tasks
        self._left: dict[int, int] = {}
        self._complete: set[int] = set()
        self._next = 0

    @property
    def told(self) -> int:
        """The number of micro-batches reported so far."""
        return self._next

    @property
    def waiting(self) -> bool:
        """Whether a complete micro-batch waits to be reported."""
        return self._next in self._complete

    def note(self, task: Task) -> None:
        """Notice that a task is done; one thread at a time."""
        left = self._left.get(task.micro_batch, self._tasks) - 1
        if left:
            self._left[task.micro_batch] = left
        else:
            self._left.pop(task.micro_batch, None)
            self._complete.add(task.micro_batch)

    def tell(self) -> None:
        """Report the complete micro-batches."""
        while self.waiting:
            number, self._next = self._next, self._next + 1
            self._complete.discard(number)
            self._tell(number)


@dataclass
class _Progress:
    """The tasks that are done so far.

    Invariant: of a call that others wait for, the first `done[call, replica]` micro-batches are
    complete. After `error` is set, workers stop at their next task.
    """

    done: dict[tuple[int, int], int]
    reports: Reports | None = None
    changes: Changes = field(default_factory=Changes)
    error: BaseException | None = None
    threads: list[threading.Thread] = field(default_factory=list)  # whose start was tried
    ended: set[threading.Thread] = field(default_factory=set)  # after their last task

    def wait(
        self, replica: int, needed: list[tuple[int, int]], reports: Reports | None = None
    ) -> bool:
        """Wait until the calls `needed` are done on their micro-batches; False: give up.

        Args:
            reports: those that this thread makes meanwhile.
        """

        def ready() -> bool:
            return all(self.done[call, replica] > micro_batch for call, micro_batch in needed)

        return self._until(ready, reports)

    def tell_all(self, micro_batches: int, reports: Reports) -> None:
        """Tell of all micro-batches, as they become complete."""
        self._until(lambda: reports.told == micro_batches, reports)

    def _until(self, ready: Callable[[], bool], reports: Reports | None) -> bool:
        """Wait, and report meanwhile; False: give up."""

        def news() -> bool:
            return reports is not None and reports.waiting

        while True:
            if news() and self.error is None:
                assert reports is not None
                reports.tell()
            if ready() and self.error is None:
                return True
            while not self.changes.wait_for(
                lambda: self.error is not None or ready() or news(), _LOOK
            ):
                if any(map(self._is_lost, self.threads)):
                    self.stop(RuntimeError(_LOST))
            if self.error is not None:
                return False

    def finish(self, task: Task) -> None:
        def note() -> None:
            self.done[task.call, task.replica] = task.micro_batch + 1
            if self.reports is not None:
                self.reports.note(task)

        self.changes.make(note)

    def stop(self, error: BaseException) -> None:
        def note() -> None:
            if self.error is None:
                self.error = error

        self.changes.make(note)

    def _is_lost(self, thread: threading.Thread) -> bool:
        """Whether a thread died without a word, as when a hook of its start raises."""
        return _is_gone(thread) and thread not in self.ended

    def join(self, thread: threading.Thread) -> None:
        """Wait for a thread's end, or if its start was interrupted, for that it does not begin."""
        give_up = monotonic() + _START
        while True:
            try:
                thread.join(_LOOK)
            except RuntimeError:  # it has not begun
                if monotonic() > give_up:
                    return
            if _is_gone(thread):
                return
            if not thread.is_alive():
                sleep(1e-3)


def _is_gone(thread: threading.Thread) -> bool:
    """Whether a thread has begun and ended.

    Not by `is_alive`: an interrupted `Thread.join` may leave a thread that runs marked as one that
    has ended (Python issue 90882).
    """
    return thread.ident is not None and thread not in threading.enumerate()


@dataclass(frozen=True)
class _Caller:
    """What threads take over from the one that calls, as it is each thread's own.

    All workers launch on the streams of the caller: so what they launch on a CUDA device runs in
    the order in which they hand it over, and after what the caller launched there before.
    """

    threads_each: int
    thread: int
    device: int | None
    streams: tuple[torch.cuda.Stream, ...]

    def take_over(self) -> None:
        work_for(self.thread)  # what it holds its workers may use
        set_intra_op_threads(self.threads_each)
        for stream in self.streams:
            torch.cuda.set_stream(stream)
        if self.device is not None:
            torch.cuda.set_device(self.device)


def _caller(threads_each: int) -> _Caller:
    if not torch.cuda.is_initialized():
        return _Caller(threads_each, caller(), None, ())
    streams = map(torch.cuda.current_stream, range(torch.cuda.device_count()))
    return _Caller(threads_each, caller(), torch.cuda.current_device(), tuple(streams))


def run_side_by_side(
    schedule: Schedule,
    work: Work,
    *,
    threads_each: int,
    in_turn: After | None = None,
    reports: Reports | None = None,
) -> None:
    """Run every task of `schedule`, each worker's in its order, after what they wait for.

    The calling thread is the first worker.

    Args:
        work: runs a task on the worker of this number.
        threads_each: intra-op threads of each worker.
        in_turn: runs after each task, in the order of micro-batches.
        reports: made on the calling thread. An error in one stops all workers.

    Raises:
        The first error that a worker met, after all workers have stopped.
    """
    if len(schedule.workers) == 1:
        for task in schedule.workers[0]:
            work(0, task)
            if in_turn is not None:
                in_turn(task)
            if reports is not None:
                reports.note(task)
                reports.tell()
        return
    replicas = {task.replica for tasks in schedule.workers for task in tasks}
    done = {(c, r): 0 for c in range(len(schedule.calls)) for r in replicas}
    progress = _Progress(done, reports)
    arguments = (schedule, work, progress, in_turn)
    try:
        calls_from = _caller(threads_each)
        for index in range(1, len(schedule.workers)):
            _start(index, calls_from, arguments)
        _run_worker(0, *arguments)
        if reports is not None:
            every = {task.micro_batch for tasks in schedule.workers for task in tasks}
            progress.tell_all(len(every), reports)
        _end(progress)
    except BaseException as error:  # also Ctrl-C: the others must stop before it goes on
        try:
            progress.stop(error)
        finally:
            try:
                _end(progress)
            finally:  # once more, after a second interrupt
                _end(progress)
    if progress.error is not None:
        raise progress.error


_Arguments = tuple[Schedule, Work, _Progress, After | None]


def _start(index: int, calls_from: _Caller, arguments: _Arguments) -> None:
    """Start a worker. After an interrupt of `Thread.start` it may be there, or come yet.

    Where a signal's handler raises in `Thread.start`, that may raise an error of its own instead:
    what the handler raised is behind it.
    """
    progress = arguments[2]
    thread = threading.Thread(
        target=_run_thread, args=(index, calls_from, arguments), name=f"ipu worker {index}"
    )
    progress.threads.append(thread)
    try:
        thread.start()
    except RuntimeError as error:
        if str(error) == _NO_THREAD:  # and not what a signal's handler raised
            progress.threads.remove(thread)
        if str(error) == _UNLOCKED:  # as the caller waited for the beginning of the thread
            raise error.__context__ or error from None
        raise
    except KeyError as error:  # just after the thread began
        raise error.__context__ or error from None


def _end(progress: _Progress) -> None:
    """Wait for all workers; an interrupt meanwhile stops each after its task."""
    while progress.threads:
        try:
            progress.join(progress.threads[-1])
            if progress.threads.pop() not in progress.ended:
                progress.stop(RuntimeError(_LOST))
        except BaseException as error:
            progress.stop(error)


def _run_thread(index: int, calls_from: _Caller, arguments: _Arguments) -> None:
    """A worker of its own thread, which takes over what is the caller's thread's own."""
    progress, thread = arguments[2], threading.current_thread()
    try:
        calls_from.take_over()
        with torch.no_grad():
            _run_worker(index, *arguments)
        progress.ended.add(thread)
    except BaseException as error:  # kept for the caller, who raises it
        progress.stop(error)


def _run_worker(
    index: int, schedule: Schedule, work: Work, progress: _Progress, in_turn: After | None
) -> None:
    reports = progress.reports if index == 0 else None  # of the calling thread
    for task in schedule.workers[index]:
        if not progress.wait(task.replica, schedule.needs(task), reports):
            return
        work(index, task)
        if in_turn is not None:
            if not progress.wait(task.replica, [(task.call, task.micro_batch - 1)]):
                return
            in_turn(task)
        progress.finish(task)
