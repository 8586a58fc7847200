"""Let no signal's handler run in the middle of a block: it runs afterwards.

Python runs handlers between any two operations of the main thread. An exception of a handler, such
as `KeyboardInterrupt`, is raised there. No signal is masked: the system delivers it, Python's
handler notes it.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

try:  # those of `signal` turn every number into an enum, which takes as long as a small update
    from _signal import getsignal  # type: ignore[import-not-found]
    from _signal import signal as set_signal
except ImportError:
    from signal import getsignal
    from signal import signal as set_signal

Handler = Callable[[int, FrameType | None], Any]
_NUMBERS = tuple(n for n in map(int, signal.valid_signals()) if n < 32)  # no real-time signals


class DeferredSignals:
    """A block in which handlers wait. It may be entered again, but not within itself.

    Invariant: outside the block `_swapped` is empty. Only the main thread runs handlers: in others
    the block is any block.

    Args:
        once: a signal that comes a second time is handled at once. For blocks that may take long.
    """

    def __init__(self, *, once: bool = False) -> None:
        self._once = once
        self._handlers: list[Any] = []  # of all signals, when they were looked at last
        self._own: list[tuple[int, Handler]] = []  # those of them that are Python's
        self._swapped: list[tuple[int, Handler]] = []
        self._noted: list[tuple[Handler, int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._put_back()  # nothing, unless the block before was left by an error in this file
        handlers = [*map(getsignal, _NUMBERS)]
        if handlers != self._handlers:
            pairs = zip(_NUMBERS, handlers, strict=True)
            self._handlers, self._own = handlers, [pair for pair in pairs if callable(pair[1])]
        try:
            for number, handler in self._own:
                self._swapped.append((number, handler))
                set_signal(number, self._note)
        except BaseException:  # raised by a handler that was still in its place
            self._put_back()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._swapped:
            try:
                self._put_back()
            finally:
                self._handle()

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self._once and any(noted == number for _, noted, _ in self._noted)
        self._noted.append((dict(self._swapped)[number], number, frame))
        if again:
            self._handle()

    def _put_back(self) -> None:
        """Put all handlers back, also when one of them is called meanwhile and raises."""
        try:
            while self._swapped:
                set_signal(*self._swapped[-1])
                self._swapped.pop()
        finally:
            if self._swapped:
                self._put_back()

    def _handle(self) -> None:
        """Call the handlers of noted signals in order; the later ones also if one raises."""
        try:
            while self._noted:
                handler, number, frame = self._noted.pop(0)
                handler(number, frame)
        finally:
            if self._noted:
                self._handle()


_here = threading.local()


@contextmanager
def signals_wait() -> Iterator[None]:
    """Run one trace of PyTorch, or one within another, to its end before handlers run.

    An exception that a handler raises in a callback of PyTorch's dispatcher may end the process. A
    trace runs the user's code, which may take long: the second Ctrl-C does not wait.
    """
    if getattr(_here, "waits", False):
        yield
        return
    try:
        _here.waits = True
        with DeferredSignals(once=True):
            yield
    finally:
        _here.waits = False
