"""Let threads through one at a time, in the order in which they came."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock that is handed to whoever has waited longest.

    Invariant: `_turn` is that of the thread in `with`, or None; those of `_waiting` come next.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._turn: threading.Lock | None = None

    def __enter__(self) -> None:
        turn = threading.Lock()
        turn.acquire()
        try:
            with self._guard:
                if self._turn is None:
                    self._turn = turn
                    return
                self._waiting.append(turn)
            turn.acquire()  # until whoever leaves hands over
        except BaseException:  # an interrupt, at any place above
            with self._guard:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                elif self._turn is turn:
                    self._hand_over()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        with self._guard:
            self._hand_over()

    def _hand_over(self) -> None:
        self._turn = self._waiting.popleft() if self._waiting else None
        if self._turn is not None:
            self._turn.release()
