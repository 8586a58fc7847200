"""Notice when a process ends, and end a process whose parent has ended."""

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


def exit_descriptor(process: BaseProcess) -> int:
    """A file descriptor that becomes readable when `process` ends.

    The sentinel of `multiprocessing` is a pipe. It stays open while another process holds an
    inherited end of it. A descriptor of the process itself is better, where the system has one.
    """
    if hasattr(os, "pidfd_open"):
        try:
            return os.pidfd_open(process.pid or 0)
        except OSError:  # it has ended already, or the kernel does not know how
            pass
    return process.sentinel


def parent_exit_descriptor() -> int | None:
    """The same for the process that started this one; None in a program's first process."""
    parent = multiprocessing.parent_process()
    return None if parent is None else exit_descriptor(parent)


class ExitWithParent:
    """A `worker_init_fn` that ends its worker soon after the reader of the worker has ended.

    PyTorch's workers look for their parent between two items. This covers a long item.

    Args:
        init: the `worker_init_fn` of the user.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        if self._init is not None:
            self._init(worker)


def _exit_with_parent() -> None:
    if (parent := parent_exit_descriptor()) is not None:
        wait([parent])
        time.sleep(GRACE_OF_LOADERS)
        os._exit(1)
