"""Let threads through one at a time, in the order in which they came."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock that is handed to whoever has waited longest.

    Invariant: a thread is in `with` if and only if `_taken`; those of `_waiting` come next.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # until whoever leaves hands over
        except BaseException:
            with self._guard:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self._leave()  # it was handed over meanwhile
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
