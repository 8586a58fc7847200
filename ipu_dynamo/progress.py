"""Say what a job does that takes long, and at its end how long everything took.

A job (`job`, `compilation`) and its steps (`begin`) know no terminal: a `Watcher` shows them.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter

from ipu_dynamo.profiling import recording
from ipu_dynamo.rank_number import this_rank
from ipu_dynamo.watcher import ONE, Doing, Watcher

log = logging.getLogger(__name__)
PROGRESS = "IPU_DYNAMO_PROGRESS"  # environment variable: 0 shows nothing

_new_watcher: ContextVar[Callable[[], Watcher] | None] = ContextVar(
    "ipu_dynamo_watcher", default=Watcher
)


@contextmanager
def watched_by(new_watcher: Callable[[], Watcher] | None) -> Iterator[None]:
    """Let a new watcher show each job of this block; with None nothing does."""
    token = _new_watcher.set(new_watcher)
    try:
        yield
    finally:
        _new_watcher.reset(token)


@dataclass
class _Job:
    """A job and its times: the `seconds` of all steps that are over, by their kinds, and how many
    there were. A job within another one takes its steps for both."""

    outer: "_Job | None"
    watcher: Watcher | None
    clock: Callable[[], float]
    begun: float = field(init=False)
    now: Doing | None = None
    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    origins: Counter[str] = field(default_factory=Counter)
    text: str = ""

    def __post_init__(self) -> None:
        self.begun = self.clock()

    def turn_to(self, doing: Doing | None, *, again: bool = False) -> None:
        """Begin a step here and in all jobs around; it is there already if it goes on `again`."""
        time = self.clock()
        self._take_time(time)
        if doing is not None and doing.number <= 1 and not again:
            self.counts[doing.what] = self.counts.get(doing.what, 0) + doing.count
        self.now, self.since = doing, time
        if self.watcher is not None and doing is not None:
            self.watcher.begins(doing)
        if self.outer is not None:
            self.outer.turn_to(doing, again=again)

    def _take_time(self, time: float) -> None:
        if self.now is not None:
            what = self.now.what
            self.seconds[what] = self.seconds.get(what, 0.0) + time - self.since

    def end(self) -> None:
        """Take the times of all."""
        self._take_time(self.clock())
        total = f"{self.clock() - self.begun:.1f} s"
        parts = [
            f"{self._counted(what)} {time:.1f} s{self._from_where(what)}"
            for what, time in self.seconds.items()
        ]
        self.text = f"{total}: {', '.join(parts)}" if parts else total

    def _from_where(self, what: str) -> str:
        if what != "functions" or not self.origins:
            return ""
        return f" ({', '.join(f'{count} from {where}' for where, count in self.origins.items())})"

    def _counted(self, what: str) -> str:
        count = self.counts.get(what, 0)
        return f"{count} {ONE[what] if count == 1 else what}" if count else what


_current: ContextVar[_Job | None] = ContextVar("ipu_dynamo_job", default=None)


@contextmanager
def job(
    title: str, *, show: bool = True, then: str = "", at_once: bool = False
) -> Iterator[Callable[[], str]]:
    """Measure the times of a job, and show its steps if it takes long, on rank 0 of several.

    A job within another one is a part of it: the outermost one decides what is shown.

    Args:
        title: as "compiling Net".
        show: whether the user wants to see it; IPU_DYNAMO_PROGRESS=0 shows nothing, either.
        then: the kind of its own steps, which come after a compilation.
        at_once: show a bar from the beginning, and a line at the end in any case.

    Returns:
        A function. After the block it returns the times: `3.2 s: tracing 0.4 s, 8 functions 2.8 s`.
    """
    outer, watcher = _current.get(), None
    if outer is None and show and os.environ.get(PROGRESS) != "0" and not this_rank():
        new_watcher = _new_watcher.get()
        watcher = None if new_watcher is None else new_watcher()
    clock = watcher.clock if watcher else outer.clock if outer else perf_counter
    current = _Job(outer, watcher, clock)
    before = outer.now if outer is not None else None
    token, times = _current.set(current), None
    try:
        if watcher is not None:
            watcher.opens(title, then=then, at_once=at_once)
        with recording.span(title, "job"):
            yield lambda: current.text
        current.end()
        times = current.text
    finally:
        _current.reset(token)
        if outer is not None:
            outer.turn_to(before, again=True)
        if watcher is not None:
            watcher.ends(times)


@contextmanager
def compilation(name: str, *, show: bool = True) -> Iterator[Callable[[], str]]:
    """Measure the times of a compilation as a job, and log them at its end.

    Args:
        name: of the compiled model.
        show: as for `job`.
    """
    with job(f"compiling {name}", show=show) as times:
        yield times
    log.info("compiled %s in %s", name, times())


def code_comes_from(origin: str) -> None:
    """Say where the code of a function is from: "memory", "disk", or "compiler"."""
    current = _current.get()
    while current is not None:
        current.origins[f"the {origin}" if origin == "compiler" else origin] += 1
        current = current.outer


def begin(what: str, number: int = 0, count: int = 0) -> None:
    """Note the next step of the job that runs in this thread, if there is one."""
    if (current := _current.get()) is not None:
        current.turn_to(Doing(what, number, count))
