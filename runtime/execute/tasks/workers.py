"""Do the actions of a schedule, one thread per worker; stop all when one fails.

Threads live for one run only. So a process may fork between calls, and a failure or an interrupt
leaves no thread, whenever it comes.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import torch

from ipu_dynamo.ops.private.locks import callers, work_for
from ipu_dynamo.program.schedule.actions import (
    Action,
    AddGradients,
    ReceiveValues,
    RunPass,
    SendValues,
)
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.runtime.changes import Changes
from ipu_dynamo.runtime.execute.tasks.rank_streams import Awaited, RankStreams
from ipu_dynamo.tune.intra_op import set_intra_op_threads

Work = Callable[[int, RunPass], None]  # a worker runs a pass
Add = Callable[[int, AddGradients], None]
_Do = Mapping[type, Callable[[int, Any], None]]  # by kind of action
_LOST = "a worker's thread ended before its actions"
_NO_THREAD = "can't start new thread"  # Python's message
_UNLOCKED = "release unlocked lock"  # a condition's message after an interrupt at the end of a wait
_LOOK = 1.0  # seconds after which a waiting worker checks that the others are still there
_START = 0.5  # seconds in which a thread begins after an interrupt of its start, if it does at all


class Reports:
    """Reports complete micro-batches to the calling thread.

    Invariant: `_left` counts the passes that are left of those that have begun, and are not
    complete.

    Args:
        tell: is called with each micro-batch, in order.
        passes: of a micro-batch, on all replicas.
    """

    def __init__(self, tell: Callable[[int], None], passes: int) -> None:
        self._tell, self._passes = tell, passes
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

    def note(self, run: RunPass) -> None:
        """Notice that a pass is done; one thread at a time."""
        left = self._left.get(run.micro_batch, self._passes) - 1
        if left:
            self._left[run.micro_batch] = left
        else:
            self._left.pop(run.micro_batch, None)
            self._complete.add(run.micro_batch)

    def tell(self) -> None:
        """Report the complete micro-batches."""
        while self.waiting:
            number, self._next = self._next, self._next + 1
            self._complete.discard(number)
            self._tell(number)


@dataclass(frozen=True, slots=True)
class _Step:
    """An action, with the receives right before it and the sends right after it.

    Args:
        needed: the messages that it waits for, by number.
        sent: the messages that are there as soon as it is done.
        awaited: the messages of other ranks that it waits for.
        handed: the sends that tell other ranks something.
    """

    needed: frozenset[int]
    action: RunPass | AddGradients | None
    sent: tuple[int, ...]
    awaited: tuple[Awaited, ...] = ()
    handed: tuple[SendValues, ...] = ()


def _steps(
    actions: Sequence[Action],
    numbers: dict[tuple[int, int, int], int],
    streams: RankStreams | None = None,
) -> list[_Step]:
    """A worker's actions as steps.

    Args:
        numbers: of messages, by transfer and place. New ones are added.
        streams: from and to other ranks.
    """
    steps: list[_Step] = []
    needed: set[int] = set()
    own: RunPass | AddGradients | None = None
    sent: list[int] = []
    awaited: list[Awaited] = []
    handed: list[SendValues] = []
    for action in (*actions, None):
        if not isinstance(action, SendValues) and (own or sent or action is None):
            ranks = tuple(awaited), tuple(handed)
            steps.append(_Step(frozenset(needed), own, tuple(sent), *ranks))
            needed, own, sent, awaited, handed = set(), None, [], [], []
        match action:
            case RunPass() | AddGradients():
                own = action
            case ReceiveValues() if streams is not None and streams.awaits(action):
                awaited += streams.awaited(action)
            case ReceiveValues(transfer=transfer):
                message = transfer, action.micro_batch, action.replica
                needed.add(numbers.setdefault(message, len(numbers)))
            case SendValues(transfer=transfer):
                message = transfer, action.micro_batch, action.replica
                sent.append(numbers.setdefault(message, len(numbers)))
                if streams is not None:
                    handed.append(action)
    return steps


@dataclass
class _Progress:
    """The messages that were sent so far.

    Invariant: `sent` only grows. After `error` is set, workers stop at their next step.
    """

    reports: Reports | None = None
    streams: RankStreams | None = None
    sent: set[int] = field(default_factory=set)
    changes: Changes = field(default_factory=Changes)
    error: BaseException | None = None
    threads: list[threading.Thread] = field(default_factory=list)  # whose start was tried
    ended: set[threading.Thread] = field(default_factory=set)  # after their last step

    def has(self, step: _Step) -> bool:
        """Whether the messages that a step waits for are there."""
        if step.awaited:
            assert self.streams is not None
            if not self.streams.have_arrived(step.awaited):
                return False
        return step.needed <= self.sent

    def wait(self, step: _Step, reports: Reports | None = None) -> bool:
        """Wait until the messages that a step waits for are there; False: give up.

        Args:
            reports: those that this thread makes meanwhile.
        """
        return self._until(lambda: self.has(step), reports)

    def look(self) -> None:
        """Let all look who wait, after another rank's message or an error of the transport."""

        def note() -> None:
            assert self.streams is not None
            self.error = self.error or self.streams.error

        self.changes.make(note)

    def tell_all(self, micro_batches: int, reports: Reports) -> None:
        """Report all micro-batches, as they become complete."""
        self._until(lambda: reports.told == micro_batches, reports)

    def _until(self, ready: Callable[[], bool], reports: Reports | None) -> bool:
        """Wait, and report meanwhile; False: give up."""

        def is_due() -> bool:
            return reports is not None and reports.waiting

        while True:
            if is_due() and self.error is None:
                assert reports is not None
                reports.tell()
            if ready() and self.error is None:
                return True
            while not self.changes.wait_for(
                lambda: self.error is not None or ready() or is_due(), _LOOK
            ):
                if any(map(self._is_lost, self.threads)):
                    self.stop(RuntimeError(_LOST))
            if self.error is not None:
                return False

    def finish(self, step: _Step) -> None:
        def note() -> None:
            self.sent.update(step.sent)
            if self.reports is not None and isinstance(step.action, RunPass):
                self.reports.note(step.action)

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
    """The thread-local settings that threads take over from the caller.

    All workers launch on the caller's streams. So kernels on a CUDA device run in the order of
    their launches, and after those that the caller launched before.
    """

    threads_each: int
    threads: tuple[int, ...]  # the caller, and those that wait for it
    device: int | None
    streams: tuple[torch.cuda.Stream, ...]

    def run_as(self) -> None:
        work_for(self.threads)  # workers may use the caller's locks
        set_intra_op_threads(self.threads_each)
        for stream in self.streams:
            torch.cuda.set_stream(stream)
        if self.device is not None:
            torch.cuda.set_device(self.device)


def _caller(threads_each: int) -> _Caller:
    if not torch.cuda.is_initialized():
        return _Caller(threads_each, callers(), None, ())
    streams = map(torch.cuda.current_stream, range(torch.cuda.device_count()))
    return _Caller(threads_each, callers(), torch.cuda.current_device(), tuple(streams))


class Workers:
    """The workers of a schedule.

    Args:
        schedule: a checked one. In an unchecked one a worker may wait for ever.
        streams: from and to other ranks; None without other ranks.
    """

    def __init__(self, schedule: Schedule, streams: RankStreams | None = None) -> None:
        numbers: dict[tuple[int, int, int], int] = {}
        waits = len(schedule.workers) > 1 or streams is not None
        self._streams = streams
        self._alone = () if waits else schedule.workers[0]
        self._steps = [_steps(actions, numbers, streams) for actions in schedule.workers if waits]
        runs = (run for of in schedule.runs for run in of)
        self._micro_batches = len({run.micro_batch for run in runs})

    def run(
        self,
        work: Work,
        *,
        threads_each: int,
        add: Add | None = None,
        reports: Reports | None = None,
    ) -> None:
        """Do all actions. Each worker does its own in their order.

        The calling thread is the first worker.

        Args:
            work: runs a pass on the worker of this number.
            threads_each: intra-op threads of each worker.
            add: adds gradients on the worker of this number.
            reports: made on the calling thread. An error in one stops all workers.

        Raises:
            The first error that a worker met, after all workers have stopped.
        """
        do: _Do = {RunPass: work, AddGradients: add or _no_add}
        if not self._steps:
            for action in self._alone:
                do[type(action)](0, action)
                if reports is not None and isinstance(action, RunPass):
                    reports.note(action)
                    reports.tell()
            return
        progress = _Progress(reports, self._streams)
        if self._streams is not None:
            self._streams.follow(progress.look)
            progress.look()
        arguments = (self._steps, do, progress)
        try:
            calls_from = _caller(threads_each)
            for index in range(1, len(self._steps)):
                _start(index, calls_from, arguments)
            _run_worker(0, *arguments)
            if reports is not None:
                progress.tell_all(self._micro_batches, reports)
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


def _no_add(_: int, action: AddGradients) -> None:
    raise AssertionError(f"{action}: the program has no gradients to add")


_Arguments = tuple[list[list[_Step]], _Do, _Progress]


def _start(index: int, calls_from: _Caller, arguments: _Arguments) -> None:
    """Start a worker. After an interrupt of `Thread.start` it may be there, or come yet.

    If a signal's handler raises in `Thread.start`, this may raise an error of its own instead. The
    handler's error is the context of that one.
    """
    progress = arguments[-1]
    thread = threading.Thread(
        target=_run_thread, args=(index, calls_from, arguments), name=f"ipu worker {index}"
    )
    progress.threads.append(thread)
    try:
        thread.start()
    except RuntimeError as error:
        if str(error) == _NO_THREAD:  # and no error of a signal's handler
            progress.threads.remove(thread)
        if str(error) == _UNLOCKED:  # as the caller waited for the beginning of the thread
            raise error.__context__ or error from None
        raise
    except KeyError as error:  # just after the thread began
        raise error.__context__ or error from None


def _end(progress: _Progress) -> None:
    """Wait for all workers; an interrupt meanwhile stops each after its step."""
    while progress.threads:
        try:
            progress.join(progress.threads[-1])
            if progress.threads.pop() not in progress.ended:
                progress.stop(RuntimeError(_LOST))
        except BaseException as error:
            progress.stop(error)


def _run_thread(index: int, calls_from: _Caller, arguments: _Arguments) -> None:
    """Run a worker in its own thread, with the thread-local settings of the caller."""
    progress, thread = arguments[-1], threading.current_thread()
    try:
        calls_from.run_as()
        with torch.no_grad():
            _run_worker(index, *arguments)
        progress.ended.add(thread)
    except BaseException as error:  # kept for the caller, who raises it
        progress.stop(error)


def _run_worker(index: int, steps: list[list[_Step]], do: _Do, progress: _Progress) -> None:
    all_reports = progress.reports
    reports = all_reports if index == 0 else None  # of the calling thread
    for step in steps[index]:
        has_reports = reports is not None and reports.waiting
        ready = progress.error is None and progress.has(step)
        if (has_reports or not ready) and not progress.wait(step, reports):
            return
        if step.awaited:
            assert progress.streams is not None
            progress.streams.take_empty(step.awaited)
        action = step.action
        if action is not None:
            do[type(action)](index, action)
        for send in step.handed:
            assert progress.streams is not None
            progress.streams.hand_over(send)
        if step.sent or all_reports is not None:
            progress.finish(step)
