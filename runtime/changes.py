"""Wait for changes by other threads, in a way that a signal's handler may leave at any time.

`threading.Condition` locks in functions of Python. If a handler raises as one of these ends, the
condition may stay locked for good, and other threads wait without end. Or it may be unlocked, and
its `with` raises an error. `with` a lock of C is one instruction.
"""

import threading
from collections.abc import Callable
from time import monotonic


class Changes:
    """Guards values, and wakes up threads that wait for one of them.

    Invariant: the lock is never held while a thread waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[threading.Lock] = []  # of those that wait, or were interrupted

    def make(self, change: Callable[[], None]) -> None:
        """Change something, and have all who wait look."""
        with self._lock:
            change()
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.release()

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until `ready`, or until that time has passed; returns whether it is."""
        end = monotonic() + seconds
        while True:
            with self._lock:
                if ready():
                    return True
                waiter = threading.Lock()
                waiter.acquire()
                self._waiters.append(waiter)
            if not waiter.acquire(timeout=max(0.0, end - monotonic())):
                return ready()
