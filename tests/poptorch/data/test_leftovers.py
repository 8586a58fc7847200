"""Check that the segments of dead workers are removed, and no others."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from poptorch.data.leftovers import Leftovers


@pytest.fixture
def worker():
    context = multiprocessing.get_context("fork")
    process = context.Process(target=time.sleep, args=(60,))
    process.start()
    yield process
    process.kill()
    process.join()


def test_what_dead_processes_left_is_removed(worker):
    own = Path(f"/dev/shm/torch_{worker.pid}_1_2")
    old, other = own.with_name(own.name + "0"), Path(f"/dev/shm/torch_{worker.pid}0_1_2")
    leftovers = Leftovers()
    leftovers.notice_processes()
    for segment in (own, old, other):
        segment.touch()
    os.utime(old, (1.0, 1.0))
    try:
        leftovers.remove()
        assert own.exists()
        worker.kill()
        worker.join()
        leftovers.remove()
        assert [segment.exists() for segment in (own, old, other)] == [False, True, True]
    finally:
        for segment in (own, old, other):
            segment.unlink(missing_ok=True)
