"""Check that every end of a program or process takes the others with it."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import poptorch
from ipu_dynamo.batches import process_exit
from poptorch import AsynchronousDataAccessor, SharingStrategy
from tests.batches.worker_processes import (
    alive,
    check_that_none_stays,
    children,
    nothing_left,
    seconds_until,
    segments,
    worker_of,
)
from tests.poptorch.data.datasets import Dying, Failing, Numbers, Slow
from tests.poptorch.data.killing import ACCESSOR, WORKERS, killed_round

ROOT = Path(__file__).resolve().parents[3]
FORK = {"sharing_strategy": SharingStrategy.Fork}  # the quickest to start


@pytest.fixture(autouse=True)
def clean():
    with nothing_left():
        yield


@contextmanager
def running(strategy, seconds):
    """A program with a loader, in a process group of its own, and the numbers of its processes."""
    command = [sys.executable, "-m", "tests.poptorch.data.program", strategy, str(seconds)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            yield program, [int(pid) for pid in program.stdout.readline().split()]
        finally:
            program.kill()


@pytest.mark.parametrize(
    "number", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 20))]
)
def test_killing_a_process_is_told_and_leaves_nothing(number):
    killed_round(random.Random(number))


class Marks:
    """A `worker_init_fn` that leaves a file when its process ends in order."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, worker):
        Finalize(None, (self.folder / str(worker)).touch, exitpriority=1)


@pytest.mark.few(4)
@pytest.mark.parametrize("bad", [9, 4])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("strategy", [SharingStrategy.Fork, SharingStrategy.ForkServer])
def test_workers_end_in_order_also_after_a_failure(tmp_path, bad, persistent, strategy):
    loader = DataLoader(
        Failing(9, bad),
        num_workers=2,
        worker_init_fn=Marks(tmp_path),
        persistent_workers=persistent,
    )
    accessor = AsynchronousDataAccessor(loader, sharing_strategy=strategy)
    with suppress(AssertionError):
        list(accessor)
    accessor.terminate()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_the_error_names_the_process_and_the_signal():
    items = iter(AsynchronousDataAccessor(Dying(9), 1, **FORK))
    next(items)
    with pytest.raises(AssertionError, match=r"data fetcher: process \d+ was killed by SIGKILL"):
        list(items)


def test_the_death_of_a_worker_is_told_where_pytorch_does_not_notice(monkeypatch):
    handling = "torch.utils.data._utils.signal_handling._set_SIGCHLD_handler"
    monkeypatch.setattr(handling, lambda: None)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        loader = DataLoader(Slow(9, 60), num_workers=2)
        items = iter(AsynchronousDataAccessor(loader, **FORK))
        next(items)
        victim = children(worker_of(items._accessor))[0]
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(AssertionError, match=f"process {victim} .* was killed by SIGKILL"):
            next(items)
        assert time.monotonic() - start < 3
    finally:
        signal.signal(signal.SIGCHLD, handler)


@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "seconds"), [("ForkServer", 0.001), ("Fork", 60)])
def test_processes_end_when_the_program_is_killed(strategy, seconds):
    shared = segments()
    with running(strategy, seconds) as (program, (_, accessor, *workers)):
        assert len(workers) == 2
        program.kill()
        seconds_until(lambda: not alive(accessor), ACCESSOR)
        seconds_until(lambda: not any(map(alive, workers)), WORKERS)
    check_that_none_stays(shared)


def test_an_interrupt_is_the_programs_own():
    with running("ForkServer", 0.001) as (program, (_, *processes)):
        os.killpg(program.pid, signal.SIGINT)  # as the terminal does
        output, _ = program.communicate(timeout=60)
        assert output == "interrupted\nand goes on\n"
        assert program.returncode == 0
        seconds_until(lambda: not any(map(alive, processes)), ACCESSOR)


def test_an_interrupt_while_the_first_item_is_made_ends_the_process(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("ipu_dynamo.batches.worker_process.WorkerProcess._receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        AsynchronousDataAccessor(Numbers(3), **FORK)


def test_a_message_that_was_half_read_is_not_read_on(monkeypatch):
    accessor = AsynchronousDataAccessor(Numbers(9), **FORK)
    items = iter(accessor)
    next(items)

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ipu_dynamo.batches.worker_process.WorkerProcess._next_message", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(items)
    for _ in range(2):
        with pytest.raises(AssertionError, match="an interrupt came"):
            next(iter(accessor))


def test_ends_are_noticed_without_process_descriptors(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    items = iter(AsynchronousDataAccessor(Dying(9), 1, **FORK))
    with pytest.raises(AssertionError, match="was killed by SIGKILL"):
        list(items)
    assert process_exit.parent_exit_descriptor() is None


def test_no_descriptor_is_left_open():
    def count():
        return len(os.listdir("/proc/self/fd"))

    list(AsynchronousDataAccessor(Numbers(2), **FORK))
    before = count()
    for strategy in (SharingStrategy.Fork, SharingStrategy.ForkServer):
        accessor = AsynchronousDataAccessor([torch.ones(3)] * 2, sharing_strategy=strategy)
        assert len(list(accessor)) == 2
        accessor.terminate()
        del accessor
    with pytest.raises(poptorch.Error):
        AsynchronousDataAccessor([lambda: 0])
    assert count() <= before + 4  # the servers of multiprocessing, when they were started here
