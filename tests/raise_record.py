"""Record where errors of this package are made while tests run, for `tests.docs.errors`.

`pytest --record-raises` patches the constructors of errors. Processes that tests start are not
recorded.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ipu_dynamo.errors import IpuError
from poptorch.errors import Error

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "raises"  # one file for each test process
_MOST_FRAMES = 8  # from a constructor to the statement that raises, through functions that help


class RaiseRecord:
    """A plugin of pytest that writes `file:line` of all frames that were making an error."""

    def __init__(self) -> None:
        self._lines: set[str] = set()
        self._name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        if self._name == "main":
            shutil.rmtree(FOLDER, ignore_errors=True)
        for kind in (IpuError, Error):
            self._watch(kind)

    def _watch(self, kind: type[Exception]) -> None:
        original = kind.__init__

        def init(error: Exception, *arguments: object, **keywords: object) -> None:
            self._lines.update(_callers())
            original(error, *arguments, **keywords)

        kind.__init__ = init  # type: ignore[method-assign]

    def pytest_unconfigure(self) -> None:
        """Write what was recorded."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{self._name}.txt").write_text("\n".join(sorted(self._lines)))


def _callers() -> Iterator[str]:
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        if file := _source(frame.f_code.co_filename):
            yield f"{file}:{frame.f_lineno}"
        frame = frame.f_back


@cache
def _source(filename: str) -> str:
    """A file of this checkout by its real path, relative to the root; empty: it is another one."""
    path = Path(filename).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def recorded() -> set[tuple[str, int]]:
    """Files and lines of the last recorded run."""
    lines = [line for file in FOLDER.glob("*.txt") for line in file.read_text().splitlines()]
    return {(file, int(line)) for file, _, line in (text.rpartition(":") for text in lines)}
