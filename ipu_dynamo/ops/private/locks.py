"""Make locks that a forked process finds free, and give the one that all compiling holds.

A thread that holds a lock does not exist in a process that another thread forks; without care the
lock would stay taken there for good.
"""

import os
import threading
from weakref import WeakSet

from ipu_dynamo.ops.private.graphs import pytorch_compile_lock

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


def _free_in_child() -> None:
    for lock in _plain:
        lock._at_fork_reinit()  # type: ignore[attr-defined]
    for nested in _nested:
        if not nested._is_owned():  # type: ignore[attr-defined]
            nested._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)
