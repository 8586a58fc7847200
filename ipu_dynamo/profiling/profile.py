"""Record a block or a whole process into a file: `ipu_dynamo.profile` and `IPU_DYNAMO_TRACE`."""

import atexit
import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ipu_dynamo.errors import IpuError, OptionError
from ipu_dynamo.profiling import recording
from ipu_dynamo.profiling.recording import Recording
from ipu_dynamo.rank_number import ranks, this_rank

log = logging.getLogger("ipu_dynamo")
TRACE = "IPU_DYNAMO_TRACE"  # environment variable: a file for the trace of the whole process
_paths: set[Path] = set()  # of the blocks that are being recorded


@contextmanager
def profile(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record all that this process compiles and runs in the block, and write it as a trace.

    The file is in Chrome's format; open it at ui.perfetto.dev. It appears as a whole when the block
    ends, also by an error or an interrupt. Blocks may nest, and blocks of several threads may
    overlap: each file has the spans of its own block. A call that is still running
    when the block ends is not in it. Recording changes no result.

    Args:
        path: of the file. Its folders are made. Of several ranks each writes a file of its own:
            `trace.rank3.json` in place of `trace.json`.

    Raises:
        IpuError: a block around this one, or one of another thread, writes the same file.
        OSError: the file cannot be written. If an error has ended the block, that one is raised.
    """
    own, target = Recording(), Path(path).absolute()
    if target in _paths:
        raise IpuError(
            f"{target} is the file of another ipu_dynamo.profile that has not ended yet\n"
            "  try:  another file; each has what its own block did"
        )
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder\n  try:  a file in it")
    target.parent.mkdir(parents=True, exist_ok=True)
    rank = _rank()
    _paths.add(target)
    recording.begin(own)
    try:
        try:
            yield
        finally:
            recording.end(own)
            _paths.discard(target)
    except BaseException as error:
        try:
            own.write(_of_rank(target, _rank() or rank))
        except OSError as problem:
            error.add_note(f"the trace could not be written to {target}: {problem}")
        raise
    own.write(_of_rank(target, _rank() or rank))


def _rank() -> str:
    """The number of this process among several, as text; empty for one alone."""
    return str(this_rank()) if ranks() > 1 else ""


def _of_rank(path: Path, rank: str) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


class _WholeProcess:
    """Records this process from now on; `write` writes what there is so far.

    A process that Python's multiprocessing has started has the same environment. Unless it is a
    rank, it writes a file of its own, with its number in the name.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._process, self._recording = path, os.getpid(), Recording()
        recording.begin(self._recording)
        atexit.register(self.write)

    def write(self) -> None:
        """Write the file; a failure is logged, since it must not change how a program ends."""
        if os.getpid() != self._process:
            return
        path = _of_rank(self._path, _rank())
        if path == self._path and multiprocessing.parent_process() is not None:
            if self._recording.is_empty:
                return
            path = path.with_name(f"{path.stem}.process{self._process}{path.suffix}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._recording.write(path)
        except OSError as error:
            log.warning("the trace could not be written to %s: %s", path, error)


_whole_process: _WholeProcess | None = None


def record_process(path: str | os.PathLike[str]) -> None:
    """Record this process until it ends, into a file; the first call decides."""
    global _whole_process
    if _whole_process is None:
        _whole_process = _WholeProcess(Path(path).absolute())


def write_process() -> None:
    """Write the file of the process, if a variable names one."""
    if _whole_process is not None:
        _whole_process.write()


if _file := os.environ.get(TRACE):
    if Path(_file).is_dir():
        raise OptionError(f"{TRACE} is {_file!r}, which is a folder; name a file in it")
    record_process(_file)
