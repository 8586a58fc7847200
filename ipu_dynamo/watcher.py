"""Show a job that takes long: a bar on a terminal, lines elsewhere."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TextIO

from tqdm import tqdm

PATIENCE = 3.0  # seconds that a job takes before anything of it is shown
_BETWEEN_LINES = 10.0  # seconds
_BETWEEN_BARS = 0.1
_WHOLE = 100  # per cent
ONE = {"passes": "pass", "functions": "function", "calls": "call", "comparisons": "comparison"}
_PARTS = {  # from which per cent of a compilation to which each kind of step goes
    "reading": (0, 5),
    "tracing": (0, 10),
    "waiting for another process": (10, 10),
    "reading the cache": (10, 15),
    "measuring": (10, 15),
    "planning stages": (10, 15),
    "passes": (15, 30),
    "functions": (30, 80),
    "compiler": (80, 99),
    "writing": (99, 99),
}


@dataclass(frozen=True, slots=True)
class Doing:
    """The current step of a job, printed as `tracing` or `function 3 of 8`.

    Args:
        what: the kind of step: "tracing", "passes", "functions", "compiler", ...
        number: which of them, counted from 1; 0 where they are not counted.
        count: how many there are.
    """

    what: str
    number: int = 0
    count: int = 0

    def __str__(self) -> str:
        if not self.number:
            return self.what
        return f"{ONE[self.what]} {self.number} of {self.count}"


# Held while progress is written. tqdm's own lock is shared with processes, and making it fixes how
# this process may start others.
_lock = threading.RLock()


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar without a thread that watches it, which would stay to the end of the process."""

    monitor_interval = 0


_Bar.set_lock(_lock)
# No fork, and no end of the process, while a thread is writing: the lock of the stream would stay
# locked for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
atexit.register(_lock.acquire, timeout=1.0)


class Watcher:
    """Shows one job once it has taken three seconds: a bar on a terminal, lines elsewhere.

    There is a line for each kind of step, and one in ten seconds. An error while it is shown ends
    only the display.

    Args:
        clock: gives seconds.
        stream: the output; None: `sys.stderr`, as it is set at the time.
        pause: a thread looks every so many seconds for something to show, as a step may take long.
            None: no such thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = perf_counter,
        stream: TextIO | None = None,
        pause: float | None = 1.0,
    ) -> None:
        self.clock = clock
        self._stream, self._pause = stream, pause
        self._process = os.getpid()  # a child that is forked shows nothing
        self._open = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._now: Doing | None = None
        self._bar: _Bar | None = None
        self._shown: set[str] = set()  # kinds of steps: of which there are lines, or in the bar
        self._last = 0.0  # when something was shown

    def opens(self, title: str, *, then: str, at_once: bool) -> None:
        """A job begins; arguments as in `job`."""
        self._title, self._then, self._at_once = title, then, at_once
        self._begun, self._open = self.clock(), True
        if self._pause is not None:
            self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
            with suppress(RuntimeError):  # no thread can be started, as at the end of the process
                self._thread.start()
        self._safely(self._look)

    def begins(self, doing: Doing) -> None:
        """A step begins, and the one before is over."""
        self._now = doing
        self._safely(self._look)

    def ends(self, times: str | None) -> None:
        """The job is over.

        Args:
            times: all of it and its parts, as `3.2 s: tracing 0.4 s, 8 functions 2.8 s`; None: it
                has failed.
        """
        self._over.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(1.0)
        self._safely(lambda: self._close(times))

    def _watch(self) -> None:
        while not self._over.wait(self._pause):
            self._safely(self._look)

    def _safely(self, show: Callable[[], None]) -> None:
        """Show something of a job of this process that is not over; an error ends the showing."""
        if self._process != os.getpid():
            return
        with _lock:
            try:
                if self._open:
                    show()
            except Exception:  # of a stream of the user's: the job goes on
                self._open = False
                with suppress(Exception):
                    if self._bar is not None:
                        self._bar.close()

    def _look(self) -> None:
        """Show the current step, if it is time."""
        time = self.clock()
        seconds, since, doing = time - self._begun, time - self._last, self._now
        kind = "" if doing is None else doing.what
        text = f"{'' if doing is None else doing} [{seconds:.0f} s]".strip()
        if self._bar is None and not self._shown:
            stream = self._stream or sys.stderr
            columns = _columns(stream)
            if seconds < PATIENCE and not (self._at_once and columns):
                return
            if columns:
                self._bar = self._new_bar(stream, self._per_cent(doing), text)
                self._shown, self._last = {kind}, time
                return
        if self._bar is not None:
            self._bar.n, self._bar.unit = max(self._bar.n, self._per_cent(doing)), text
            if self._shown != {kind} or since >= _BETWEEN_BARS:
                self._shown, self._last = {kind}, time
                self._bar.refresh()
        elif kind not in self._shown or since >= _BETWEEN_LINES:
            self._shown.add(kind)
            self._last = time
            self._write(f"{self._title}: {text}")

    def _new_bar(self, stream: TextIO, per_cent: int, text: str) -> _Bar:
        return _Bar(
            total=_WHOLE,
            initial=per_cent,
            desc=self._title,
            unit=text,
            file=stream,
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {unit}",
        )

    def _per_cent(self, doing: Doing | None) -> int:
        """How much of the job is over when a step begins."""
        if doing is None:
            return 0
        over = max(doing.number - 1, 0) / max(doing.count, 1)
        if doing.what == self._then:
            return int(50 + 49 * over)
        first, last = _PARTS.get(doing.what, (0, 0))
        whole = first + (last - first) * over
        return int(whole / 2 if self._then else whole)

    def _close(self, times: str | None) -> None:
        self._open = False
        if self._bar is not None:
            if times is not None:
                self._bar.n, self._bar.unit = _WHOLE, times
                self._bar.dynamic_ncols, self._bar.ncols = False, None  # the whole text is shown
            self._bar.close()
        elif times is not None and (self._shown or self._at_once):
            self._write(f"{self._title}: 100% in {times}")

    def _write(self, line: str) -> None:
        stream = self._stream or sys.stderr
        stream.write(f"{line}\n")
        stream.flush()


def _columns(stream: TextIO) -> int:
    """The width of a terminal; 0 of one that has none, and of anything else."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (AttributeError, OSError, ValueError):
        return 0
