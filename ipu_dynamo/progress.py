"""Say what a compilation is doing, to whoever watches, and in the log how long it took."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

log = logging.getLogger(__name__)
_ONE = {"passes": "pass", "functions": "function"}


@dataclass(frozen=True, slots=True)
class Doing:
    """What is being done now, printed as `tracing` or `function 3 of 8`.

    Args:
        what: "tracing", "measuring", "passes", "functions" or "compiler".
        number: which of them, counted from 1; 0 where they are not counted.
        count: how many there are.
    """

    what: str
    number: int = 0
    count: int = 0

    def __str__(self) -> str:
        if not self.number:
            return self.what
        return f"{_ONE[self.what]} {self.number} of {self.count}"


class Watcher(Protocol):
    """Who wants to know what a compilation does."""

    def begins(self, doing: Doing) -> None:
        """Something begins, and what was done before is over."""

    def is_done(self, times: str) -> None:
        """The compilation is complete.

        Args:
            times: all of it and its parts, as `3.2 s: tracing 0.4 s, 8 functions 2.8 s`.
        """


_watcher: ContextVar[Watcher | None] = ContextVar("ipu_dynamo_watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` know what compilations in this block do."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@dataclass
class _Compilation:
    """The times of one compilation: the `seconds` of all that is over, by what it was, and how many
    there were."""

    begun: float = field(default_factory=perf_counter)
    now: Doing | None = None
    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    origins: Counter[str] = field(default_factory=Counter)
    text: str = ""

    def turn_to(self, doing: Doing | None) -> None:
        time, over = perf_counter(), self.now
        if over is not None:
            self.seconds[over.what] = self.seconds.get(over.what, 0.0) + time - self.since
        if doing is not None and doing.number <= 1:
            self.counts[doing.what] = self.counts.get(doing.what, 0) + doing.count
        self.now, self.since = doing, time

    def times(self) -> str:
        total = f"{perf_counter() - self.begun:.1f} s"
        parts = [
            f"{self._counted(what)} {time:.1f} s{self._from_where(what)}"
            for what, time in self.seconds.items()
        ]
        return f"{total}: {', '.join(parts)}" if parts else total

    def _from_where(self, what: str) -> str:
        if what != "functions" or not self.origins:
            return ""
        return f" ({', '.join(f'{count} from {where}' for where, count in self.origins.items())})"

    def _counted(self, what: str) -> str:
        count = self.counts[what]
        return f"{count} {_ONE[what] if count == 1 else what}" if count else what


_current: ContextVar[_Compilation | None] = ContextVar("ipu_dynamo_compilation", default=None)


@contextmanager
def compilation(name: str) -> Iterator[Callable[[], str]]:
    """Take the times of a compilation, and tell them at its end.

    Args:
        name: of what is compiled.

    Returns:
        What gives these times, once the block has ended.
    """
    current = _Compilation()
    token = _current.set(current)
    try:
        yield lambda: current.text
    finally:
        _current.reset(token)
    current.turn_to(None)
    current.text = times = current.times()
    log.info("compiled %s in %s", name, times)
    if (watcher := _watcher.get()) is not None:
        watcher.is_done(times)


def code_comes_from(origin: str) -> None:
    """Say where the code of a function is from: "memory", "disk", or "compiler"."""
    if (current := _current.get()) is not None:
        current.origins[f"the {origin}" if origin == "compiler" else origin] += 1


def begin(what: str, number: int = 0, count: int = 0) -> None:
    """Say what the compilation that runs in this thread, if there is one, does from now on."""
    if (current := _current.get()) is None:
        return
    doing = Doing(what, number, count)
    current.turn_to(doing)
    if (watcher := _watcher.get()) is not None:
        watcher.begins(doing)
