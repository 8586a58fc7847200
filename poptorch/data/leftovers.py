"""Remove the shared memory that a loader's worker leaves when it is killed.

PyTorch names a segment, makes room in it, and takes the name away again. A process that is killed
in between leaves it for good.
"""

import multiprocessing
import os
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

_FOLDER = Path("/dev/shm")  # where Linux shows the names


class Leftovers:
    """Segments of processes that this one has started.

    Only those of this user from this process's time are removed: where containers share the folder,
    the numbers of processes are not enough.
    """

    def __init__(self) -> None:
        self._processes: set[BaseProcess] = set()
        self._since = time.time() - 1  # the clock of files is a coarse one

    def notice_processes(self) -> None:
        """Remember the processes that run now, and forget those that have ended in order."""
        self._processes = {process for process in self._processes if process.exitcode != 0}
        self._processes.update(multiprocessing.active_children())

    def remove(self) -> None:
        """Remove what those that have ended have left."""
        for process in self._processes:
            if not process.is_alive():
                for segment in _FOLDER.glob(f"torch_{process.pid}_*"):
                    with suppress(FileNotFoundError):
                        self._remove(segment)

    def _remove(self, segment: Path) -> None:
        status = segment.stat()
        if status.st_uid == os.getuid() and status.st_mtime >= self._since:
            segment.unlink()
