"""Show jobs to a terminal with columns, to one without, and to a file, by a clock of the test."""

import fcntl
import io
import itertools
import os
import pty
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ipu_dynamo.progress import Watcher, watched_by
from ipu_dynamo.watcher import Doing


class Output:
    """A stream, and what was written to it: on a terminal of so many columns, or, with None, in a
    file."""

    def __init__(self, columns: int | None) -> None:
        self.text = ""
        if columns is None:
            self.stream = io.StringIO()
            return
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
        self.stream = os.fdopen(slave, "w")
        self._reader = threading.Thread(target=self._read)  # else a full terminal would block
        self._reader.start()

    def _read(self) -> None:
        with os.fdopen(self._master, "rb", buffering=0) as master:
            content = b""
            while True:
                try:
                    part = master.read(4096)
                except OSError:  # the other end is closed
                    break
                content += part
        self.text = content.decode().replace("\r\n", "\n")

    def close(self) -> str:
        """What was written."""
        if isinstance(self.stream, io.StringIO):
            self.text = self.stream.getvalue()
        else:
            self.stream.close()
            self._reader.join()
        return self.text


class Audience(Watcher):
    """Watchers that show one job, each on its own output, and the kinds of its steps."""

    def __init__(self, outputs: dict[str, Output]) -> None:
        self.clock = seconds_pass()
        self.kinds: list[str] = []
        self._watchers = [Watcher(seconds_pass(), o.stream, None) for o in outputs.values()]

    def opens(self, title: str, *, then: str, at_once: bool) -> None:
        self.title = title
        for watcher in self._watchers:
            watcher.opens(title, then=then, at_once=at_once)

    def begins(self, doing: Doing) -> None:
        self.kinds.append(doing.what)
        for watcher in self._watchers:
            watcher.begins(doing)

    def ends(self, times: str | None) -> None:
        for watcher in self._watchers:
            watcher.ends(times)


def seconds_pass(seconds: float = 4.0) -> Callable[[], float]:
    """A clock that goes on by so much whenever it is read."""
    return itertools.count(0.0, seconds).__next__


class Shown:
    """What jobs have shown: whole outputs by name, and the audience of each job."""

    def __init__(self) -> None:
        self.jobs: list[Audience] = []
        self.outputs = {"wide": Output(130), "no columns": Output(0), "file": Output(None)}
        self.texts: dict[str, str] = {}

    def new_watcher(self) -> Watcher:
        self.jobs.append(Audience(self.outputs))
        return self.jobs[-1]


@contextmanager
def shown() -> Iterator[Shown]:
    """Let the jobs of this block be shown; their texts are there behind it."""
    seen = Shown()
    with ExitStack() as stack:
        for name, output in seen.outputs.items():
            stack.callback(lambda n=name, o=output: seen.texts.update({n: o.close()}))
        stack.enter_context(watched_by(seen.new_watcher))
        yield seen
