"""Hand results to a thread of callbacks while the program goes on."""

import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

_END = object()


class CallbackThread:
    """Call `deliver(step, results)` for each step, in order, in a background thread.

    Invariant: at most `depth` steps wait; `put` blocks until there is room. After an exception of
    `deliver` no step is delivered, and `put` does not block.
    """

    def __init__(self, deliver: Callable[[int, Sequence[Any]], None], depth: int) -> None:
        self._deliver = deliver
        self._steps: queue.Queue[Any] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._work, name="ipu-callbacks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait until all steps are delivered; after an exception, only for the one at work.

        Raises:
            BaseException: the exception of `deliver`, unless the block raised another one.
        """
        self._cancelled = kind is not None
        self._steps.put(_END)
        self._thread.join()
        if kind is None:
            self.check()

    def put(self, step: int, results: Sequence[Any]) -> None:
        """Deliver the results of a step soon."""
        self._steps.put((step, results))

    def check(self) -> None:
        """Raise what `deliver` raised."""
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (item := self._steps.get()) is not _END:
            if self._error is None and not self._cancelled:
                try:
                    self._deliver(*item)
                except BaseException as error:  # raised again by the thread that put the steps
                    self._error = error
