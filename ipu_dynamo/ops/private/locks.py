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
    """What a thread holds while it traces or compiles; it may take the lock again.

    Tracing replaces names of PyTorch and enters modes that are the whole process's, and Inductor
    writes to folders that its environment names. It is PyTorch's own lock, so that
    `torch.compile` in another thread waits, too, and no order of two locks has to be kept.
    """
    lock = pytorch_compile_lock()
    _nested.add(lock)
    return lock


_here = threading.local()


def work_for(caller: int) -> None:
    """Let this thread, which ends with the call of another one, count as that one."""
    _here.caller = caller


def caller() -> int:
    """The number of the thread whose call this is: a worker's is the one that waits for it."""
    return getattr(_here, "caller", None) or threading.get_ident()


class _Turn:
    """A place in the queue of a lock.

    Args:
        lock: that the turn is for.
        caller: whose turn it is.

    Attributes:
        thread: that waits, which may be a worker of the caller.
        over: held by this thread until the turn has ended, in whichever way.
    """

    __slots__ = ("caller", "lock", "over", "thread")

    def __init__(self, lock: "QueueLock", caller: int) -> None:
        self.lock, self.caller = lock, caller
        self.thread, self.over = threading.get_ident(), threading.RLock()


class QueueLock:
    """A lock that threads get in the order in which they ask for it.

    The caller that has it may take it again, also in its workers and in a signal's handler. A
    caller that would wait for itself gets an error. A forked process finds the lock free.

    Invariant: `_turns` has each turn that has begun to wait and has not ended. It may also have
    turns that an interrupt has ended. Their `over` is free. A thread that gets the `over` of a turn
    before its own removes that turn.

    Args:
        refusal: makes the error of a caller that would wait for itself.
    """

    def __init__(self, refusal: Callable[[], Exception] | None = None) -> None:
        self._refusal = refusal or _deadlock
        self._holder: int | None = None  # the caller that has the lock
        self._turns: deque[_Turn] = deque()
        _queues.add(self)

    def run(self, action: Callable[[], _Result]) -> _Result:
        """Return what `action` returns. No other caller runs one at the same time.

        Raises:
            IpuError: a caller that has the lock waits for one that this caller has.
        """
        me = caller()
        if self._holder == me:
            return action()
        turn = _Turn(self, me)
        # An interrupt comes after a call or at the beginning of a function. None comes between the
        # end of a `with` of Python's own locks and their release.
        with turn.over:
            try:
                self._turns.append(turn)
                if self._turns[0] is not turn:
                    self._wait(turn)
                try:
                    self._holder = me
                    return action()
                finally:
                    self._holder = None
            finally:
                self._remove(turn)

    def is_mine(self) -> bool:
        """Whether this thread has the lock, or works for a caller that has it."""
        return self._holder == caller()

    def _wait(self, turn: _Turn) -> None:
        """Wait until all turns before this one have ended."""
        try:
            with DeferredSignals(), _looking:  # a handler may wait for a lock, too
                self._check_order(turn.caller)
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

    def _check_order(self, me: int) -> None:
        """Raise if the caller that has the lock waits for this one, or for one that does."""
        locks, seen = [self], set[QueueLock]()
        while locks:
            lock = locks.pop()
            if lock._holder == me:
                raise self._refusal()
            seen.add(lock)
            next_ones = [turn.lock for turn in _waiting if turn.caller == lock._holder]
            locks += [each for each in next_ones if each not in seen]

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
