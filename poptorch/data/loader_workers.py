"""Notice when a loader's worker is killed, and remove the shared memory that it leaves.

PyTorch raises in the main thread, where the error may be lost, and looks again after 5 seconds. It
names a segment, makes room in it, and takes the name away again: a process that is killed in
between leaves it for good.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

_FOLDER = Path("/dev/shm")  # where Linux shows the names


class LoaderWorkers:
    """The processes that a loader has started from this one.

    Only segments of this user from this process's time are removed: where containers share the
    folder, the numbers of processes are not enough.
    """

    def __init__(self) -> None:
        self._processes: tuple[BaseProcess, ...] = ()
        self._told: set[BaseProcess] = set()
        self._since = time.time() - 1  # the clock of files is a coarse one

    def add(self, processes: Iterable[BaseProcess]) -> None:
        """Watch these too, and forget those that have ended in order."""
        running = [process for process in self._processes if _code(process) != 0]
        self._processes = (*running, *processes)

    def reason_of_death(self) -> str | None:
        """Which worker was killed or has failed, and how; each is told once."""
        for process in self._processes:
            if process not in self._told and (code := _code(process)):
                self._told.add(process)
                how = f"ended with exit code {code}"
                if code < 0:
                    how = f"was killed by {signal.Signals(-code).name}"
                return f"worker process {process.pid} of the loader {how}"
        return None

    def remove_leftovers(self) -> None:
        """Remove the segments of those that have ended."""
        for process in self._processes:
            if _code(process) is not None:
                for segment in _FOLDER.glob(f"torch_{process.pid}_*"):
                    with suppress(FileNotFoundError):
                        self._remove(segment)

    def _remove(self, segment: Path) -> None:
        status = segment.stat()
        if status.st_uid == os.getuid() and status.st_mtime >= self._since:
            segment.unlink()


def _code(process: BaseProcess) -> int | None:
    """The exit code, negative for a signal; None while the process runs.

    The system keeps it, so that PyTorch can ask too, from another thread.
    """
    try:
        ended = os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # asked before, or the child of a server
        return process.exitcode
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
