"""Copy loaders without their workers, report killed workers, and remove their shared memory.

PyTorch raises in the main thread, where the error may be lost, and looks again after 5 seconds. It
names a segment of shared memory, makes room in it, and takes the name away again. A process that is
killed in between leaves the segment for good.
"""

import copy
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

_FOLDER = Path("/dev/shm")  # where Linux shows the names


def without_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of `loader` that has started no processes yet, and starts its own."""
    other = copy.copy(loader)
    other._iterator = None  # a private name of PyTorch: the iterator holds the processes
    return other


class LoaderWorkers:
    """The processes that a loader has started from this one.

    It removes only segments of this user that are younger than itself. Process ids alone are not
    enough where containers share the folder.
    """

    def __init__(self) -> None:
        self._processes: tuple[BaseProcess, ...] = ()
        self._reported: set[BaseProcess] = set()
        self._since = time.time() - 1  # the clock of files is a coarse one

    def add(self, processes: Iterable[BaseProcess]) -> None:
        """Watch these too, and forget those that have ended in order."""
        running = [process for process in self._processes if _exit_code(process) != 0]
        self._processes = (*running, *processes)

    def failure(self) -> str | None:
        """A text on a worker that was killed or has failed; each is reported once."""
        for process in self._processes:
            if process not in self._reported and (code := _exit_code(process)):
                self._reported.add(process)
                how = f"ended with exit code {code}"
                if code < 0:
                    how = f"was killed by {signal.Signals(-code).name}"
                return f"worker process {process.pid} of the loader {how}"
        return None

    def remove_leftovers(self) -> None:
        """Remove the segments of the processes that have ended."""
        for process in self._processes:
            if _exit_code(process) is not None:
                for segment in _FOLDER.glob(f"torch_{process.pid}_*"):
                    with suppress(FileNotFoundError):
                        self._remove(segment)

    def _remove(self, segment: Path) -> None:
        status = segment.stat()
        if status.st_uid == os.getuid() and status.st_mtime >= self._since:
            segment.unlink()


def _exit_code(process: BaseProcess) -> int | None:
    """The exit code, negative for a signal; None while the process runs.

    The system keeps the code, so that PyTorch can read it too, from another thread.
    """
    try:
        ended = os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # read before, or the child of a server
        return process.exitcode
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
