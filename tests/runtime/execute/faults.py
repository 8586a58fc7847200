"""Raise an error at a chosen line of a step, in any of its threads.

Not where Python leaves a `with` block: it would skip the end of the block, such as the release of a
lock, which neither an operator nor a signal can do. Signals are looked for between calls.
"""

import dis
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import NamedTuple

_FOLDERS = ("/ipu_dynamo/runtime/execute/", "/ipu_dynamo/runtime/update/")


class Line(NamedTuple):
    """A line of the runtime, and the thread that is at it."""

    thread: str
    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[1]}:{self.number} ({self.thread})"


class Interrupt(BaseException):
    """What comes from outside, as Ctrl-C does."""


class Failure(Exception):
    """What an operator raises."""


@cache
def _ends_of_blocks(code: CodeType) -> frozenset[int]:
    """Where Python begins to call `__exit__` without an error: with None, three times."""
    found = set()
    instructions = list(dis.get_instructions(code))
    for index, first in enumerate(instructions):
        three = instructions[index : index + 3]
        if [(i.opname, i.argval) for i in three] == [("LOAD_CONST", None)] * 3:
            found.add(first.offset)
            if instructions[index - 1].opname == "SWAP":  # there is a result
                found.add(instructions[index - 1].offset)
    return frozenset(found)


class Tracer:
    """Counts how often each line is reached, and raises at one of them.

    Args:
        at: where; None: nowhere.
        time: at its how-manieth event.
        error: what to raise.
        now: called when it is raised.
    """

    def __init__(
        self,
        at: Line | None = None,
        time: int = 0,
        error: type[BaseException] = Interrupt,
        now: Callable[[], object] = lambda: None,
    ) -> None:
        self.reached: Counter[Line] = Counter()
        self.found: object = None  # what `now` returned
        self.raised = False
        self._at, self._time, self._error, self._now = at, time, error, now

    def __call__(self, frame, event, _):
        return self._line if any(f in frame.f_code.co_filename for f in _FOLDERS) else None

    def _line(self, frame, event, _):
        if event == "line" and frame.f_lasti not in _ends_of_blocks(frame.f_code):
            thread = threading.current_thread().name
            line = Line(thread, frame.f_code.co_filename, frame.f_lineno)
            self.reached[line] += 1
            if line == self._at and self.reached[line] == self._time:
                self.raised = True
                self.found = self._now()
                raise self._error(str(line))
        return self._line


@contextmanager
def traced(tracer: Tracer) -> Iterator[None]:
    """Trace this thread, and those that are started."""
    threading.settrace(tracer)
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)
