"""Make locks that a forked process finds free, and return the one that all compiling holds.

A thread that holds a lock does not exist in a process that another thread forks; without care the
lock would stay taken there for good.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.ops.private.graphs import pytorch_compile_lock

_Result = TypeVar("_Result")
_plain: WeakSet[threading.Lock] = WeakSet()
_nested: WeakSet[threading.RLock] = WeakSet()


def fork_safe_lock() -> threading.Lock:
    """A lock that is free in a forked process. Nothing may fork while it is held and go on."""
    lock = threading.Lock()
    _plain.add(lock)
    return lock


def nested_lock() -> threading.RLock:
    """The same, which the thread that holds it may take again: in a signal's handler, say."""
    lock = threading.RLock()
    _nested.add(lock)
    return lock


def compile_lock() -> threading.RLock:
    """The lock that a thread holds while it traces or compiles; it may take the lock again.

    Tracing replaces names of PyTorch and enters modes that are the whole process's, and Inductor
    writes to folders that its environment names. It is PyTorch's own lock, so that
    `torch.compile` in another thread waits, too, and no order of two locks has to be kept.
    """
    lock = pytorch_compile_lock()
    _nested.add(lock)
    return lock


_here = threading.local()


def work_for(threads: tuple[int, ...]) -> None:
    """Let this thread count as those that wait for it, which `callers` gave in the last one."""
    _here.callers = threads


def callers() -> tuple[int, ...]:
    """The numbers of this thread and of those that wait for its work, the first caller last."""
    return (threading.get_ident(), *getattr(_here, "callers", ()))


def caller() -> int:
    """The number of this thread; for a worker, that of the thread that waits for it."""
    above = getattr(_here, "callers", None)
    return above[-1] if above else threading.get_ident()


class _Turn:
    """A place of this thread in the queue of a lock.

    Attributes:
        callers: the threads that wait for it, after itself.
        over: held by this thread until the turn has ended, in whichever way.
    """

    __slots__ = ("callers", "lock", "over", "thread")

    def __init__(self, lock: "QueueLock") -> None:
        self.lock, self.callers, self.over = lock, callers(), threading.RLock()
        self.thread = self.callers[0]


class QueueLock:
    """A lock that threads get in the order in which they ask for it.

    The thread that has it may take it again, also in its workers and in a signal's handler. A
    thread that would wait for itself gets an error. A forked process finds the lock free, but
    nothing may fork while it waits and go on.

    Invariant: `_turns` has each turn that has begun to wait and has not ended. It may also have
    turns that an interrupt has ended. Their `over` is free. A thread that gets the `over` of a turn
    before its own removes that turn.

    Args:
        refusal: makes the error of a thread that would wait for itself.
    """

    def __init__(self, refusal: Callable[[], Exception] | None = None) -> None:
        self._refusal = refusal or _deadlock
        self._holder: _Turn | None = None
        self._turns: deque[_Turn] = deque()
        _queues.add(self)

    def run(self, action: Callable[[], _Result]) -> _Result:
        """Return what `action` returns. No other thread runs one at the same time, but workers of
        this one.

        Raises:
            Exception: the error of `refusal`, by default an IpuError. The thread that has the lock
                waits for this one.
        """
        if self.held_here():
            return action()
        turn = _Turn(self)
        # An interrupt comes after a call or at the beginning of a function. None comes between the
        # end of a `with` of Python's own locks and their release.
        with turn.over:
            try:
                self._turns.append(turn)
                if self._turns[0] is not turn:
                    self._wait(turn)
                try:
                    self._holder = turn
                    return action()
                finally:
                    self._holder = None
            finally:
                self._remove(turn)

    def held_here(self) -> bool:
        """Whether this thread has the lock, or works for one that has it."""
        holder = self._holder
        return holder is not None and holder.thread in callers()

    def _wait(self, turn: _Turn) -> None:
        """Wait until all turns before this one have ended."""
        try:
            with DeferredSignals(), _looking:  # a handler may wait for a lock, too
                self._check_order(turn)
                _waiting.add(turn)
            while (before := self._before(turn)) is not None:
                with before.over:
                    self._remove(before)
        finally:
            _waiting.discard(turn)

    def _before(self, turn: _Turn) -> _Turn | None:
        """The turn before that of a thread. A handler comes in while its thread waits: it goes
        before that thread, which cannot go on."""
        before = None
        for other in tuple(self._turns):
            if other.thread == turn.thread:
                break
            before = other
        return before

    def _check_order(self, turn: _Turn) -> None:
        """Raise if this turn would wait for a thread that waits for this one.

        A turn waits for the holder of its lock, and for the turns before it. A holder waits for
        its workers, too: for each waiting turn that has it among its callers.
        """
        waiting = tuple(_waiting)  # others leave it meanwhile
        turns, seen = [turn], {turn}
        while turns:
            one = turns.pop()
            holder, ahead = one.lock._holder, set[int]()
            for each in tuple(one.lock._turns):
                if each.thread == one.thread:
                    break
                if each in waiting:  # an interrupt has ended others
                    ahead.add(each.thread)
            if (holder is not None and holder.thread in turn.callers) or turn.thread in ahead:
                raise self._refusal()
            for each in waiting:
                of_holder = holder is not None and holder.thread in each.callers
                if (of_holder or each.thread in ahead) and each not in seen:
                    seen.add(each)
                    turns.append(each)

    def _remove(self, turn: _Turn) -> None:
        if turn in self._turns:
            self._turns.remove(turn)

    def _free(self) -> None:
        self._turns.clear()
        self._holder = None


_queues: WeakSet[QueueLock] = WeakSet()
_looking = nested_lock()  # guards `_waiting` while a caller compares its turn with all others
_waiting: set[_Turn] = set()


def _deadlock() -> Exception:
    return IpuError(
        "two calls wait for each other: each needs a lock that the other one holds\n"
        "  try:  read weights of other models between calls"
    )


def _free_in_child() -> None:
    _waiting.clear()
    for queue in _queues:
        queue._free()
    for lock in _plain:
        lock._at_fork_reinit()  # type: ignore[attr-defined]
    for nested in _nested:
        if not nested._is_owned():  # type: ignore[attr-defined]
            nested._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)
