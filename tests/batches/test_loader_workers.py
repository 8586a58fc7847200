"""Check that the death of workers is told, and their segments are removed, but no others."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from ipu_dynamo.batches.loader_workers import LoaderWorkers
from tests.batches.worker_processes import alive, seconds_until


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
    workers = LoaderWorkers()
    workers.add([worker])
    for segment in (own, old, other):
        segment.touch()
    os.utime(old, (1.0, 1.0))
    try:
        workers.remove_leftovers()
        assert own.exists()
        worker.kill()
        worker.join()
        workers.remove_leftovers()
        assert [segment.exists() for segment in (own, old, other)] == [False, True, True]
    finally:
        for segment in (own, old, other):
            segment.unlink(missing_ok=True)


def test_each_death_is_told_once(worker):
    workers = LoaderWorkers()
    workers.add([worker])
    assert workers.failure() is None
    worker.kill()
    seconds_until(lambda: not alive(worker.pid), 5)
    text = f"worker process {worker.pid} of the loader was killed by SIGKILL"
    assert workers.failure() == text
    assert workers.failure() is None
    assert worker.exitcode == -9  # which others may still ask for


@pytest.mark.parametrize(("code", "text"), [(0, None), (3, "ended with exit code 3")])
def test_an_exit_code_is_told_unless_it_is_zero(code, text):
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(code,))
    process.start()
    seconds_until(lambda: not alive(process.pid), 5)
    workers = LoaderWorkers()
    workers.add([process])
    reason = workers.failure()
    assert reason is None if text is None else reason.endswith(text)
    process.join()
