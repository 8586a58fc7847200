"""End a process that has lost the one it works for, and tell when a process has ended."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

# seconds; PyTorch's loader workers look for their parent every 5, and end without harm then
GRACE_OF_LOADERS = 6.0


def death_of(process: BaseProcess) -> int:
    """A file descriptor that becomes readable when `process` ends.

    The sentinel of `multiprocessing` is a pipe, which stays open as long as some other process has
    inherited its end; where the system watches processes themselves, that is better.
    """
    if hasattr(os, "pidfd_open"):
        try:
            return os.pidfd_open(process.pid or 0)
        except OSError:  # it has ended already, or the kernel does not know how
            pass
    return process.sentinel


def death_of_parent() -> int | None:
    """The same for the process that started this one; None in a program's first process."""
    parent = multiprocessing.parent_process()
    return None if parent is None else death_of(parent)


class EndsWithParent:
    """A `worker_init_fn` whose worker ends soon after the process that reads from it.

    PyTorch's workers look by themselves between two items; this is for those whose item takes long.

    Args:
        init: the `worker_init_fn` of the user.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        if self._init is not None:
            self._init(worker)


def _end_with_parent() -> None:
    if (parent := death_of_parent()) is not None:
        wait([parent])
        time.sleep(GRACE_OF_LOADERS)
        os._exit(1)
