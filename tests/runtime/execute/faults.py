"""Raise an error at a chosen line of a step, in any of its threads.

Not where Python leaves a `with` block, nor at the first line of a `finally`, nor at `try:` and
`pass`, which do nothing: it would skip the end of the block, such as the release of a lock, which
neither an operator nor a signal can do. Signals are looked for after calls, and the last call
before such a line is in the block, or before it.
"""

import ast
import dis
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import NamedTuple

RUNTIME = ("/ipu_dynamo/runtime/execute/", "/ipu_dynamo/runtime/update/")


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
    """Where Python does nothing, or begins to call `__exit__` without an error: with None, three
    times."""
    found = set()
    instructions = list(dis.get_instructions(code))
    for index, first in enumerate(instructions):
        if first.opname == "NOP":
            found.add(first.offset)
        three = instructions[index : index + 3]
        if [(i.opname, i.argval) for i in three] == [("LOAD_CONST", None)] * 3:
            found.add(first.offset)
            if instructions[index - 1].opname == "SWAP":  # there is a result
                found.add(instructions[index - 1].offset)
    return frozenset(found)


@cache
def _begins_of_finally(file: str) -> frozenset[int]:
    tries = (
        node
        for node in ast.walk(ast.parse("".join(linecache.getlines(file))))
        if hasattr(node, "finalbody")
    )
    return frozenset(node.finalbody[0].lineno for node in tries if node.finalbody)


class Tracer:
    """Counts how often each line is reached, and raises at one of them.

    Args:
        at: where; None: nowhere.
        time: at its how-manieth event.
        error: what to raise.
        now: called when it is raised.
        folders: parts of the paths of the files whose lines count; those of tests never do.
    """

    def __init__(
        self,
        at: Line | None = None,
        time: int = 0,
        error: type[BaseException] = Interrupt,
        now: Callable[[], object] = lambda: None,
        *,
        folders: tuple[str, ...] = RUNTIME,
    ) -> None:
        self.reached: Counter[Line] = Counter()
        self.found: object = None  # what `now` returned
        self.raised = False
        self._at, self._time, self._error, self._now = at, time, error, now
        self._folders = folders

    def __call__(self, frame, event, _):
        file = frame.f_code.co_filename
        ours = any(folder in file for folder in self._folders) and "/tests/" not in file
        return self._line if ours else None

    def _line(self, frame, event, _):
        code = frame.f_code
        skipped = frame.f_lasti in _ends_of_blocks(code) or frame.f_lineno in _begins_of_finally(
            code.co_filename
        )
        if event == "line" and not skipped:
            thread = threading.current_thread().name
            line = Line(thread, code.co_filename, frame.f_lineno)
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
