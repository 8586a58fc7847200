"""Look at processes and at shared memory, from outside."""

import os
import time
from contextlib import contextmanager
from pathlib import Path


def worker_of(accessor):
    """The number of an accessor's process."""
    return accessor._worker._process.pid


def alive(pid):
    """Whether a process runs; one that has ended and that nobody has asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid):
    """The processes that a process has started and that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid and alive(folder.name):
                found.append(int(folder.name))
    return found


def seconds_until(condition, limit):
    """How long it takes until a condition holds; an error when it takes too long."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit, f"not within {limit} seconds"
        time.sleep(0.02)
    return time.monotonic() - start


def segments():
    """The names in the system's shared memory."""
    return set(os.listdir("/dev/shm"))


def check_that_none_stays(shared):
    """Check that segments that are not of `shared` go away; other programs make some, too."""
    new = segments() - shared
    seconds_until(lambda: not new & segments(), 5)


@contextmanager
def nothing_left():
    """Check that the processes that are started inside end, and that no segment stays."""
    before, shared = set(children(os.getpid())), segments()
    yield
    seconds_until(lambda: set(children(os.getpid())) - before - _servers() == set(), 5)
    check_that_none_stays(shared)


def _servers():
    """The processes that `multiprocessing` keeps until the program ends."""
    from multiprocessing import forkserver, resource_tracker

    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
