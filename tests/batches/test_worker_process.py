"""Check the items and errors of a worker process, without the names of PopTorch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ipu_dynamo.batches.worker_loop import WorkerSettings
from ipu_dynamo.batches.worker_process import WorkerDied, WorkerProcess
from ipu_dynamo.errors import BatchError
from tests.batches.worker_processes import alive, nothing_left

ROOT = Path(__file__).resolve().parents[2]
initialised = False


@pytest.fixture
def clean():
    with nothing_left():
        yield


def tensors_of(item):
    return [item]


def init():
    global initialised
    initialised = True


def started(data, start_method, **settings):
    return WorkerProcess(
        data,
        WorkerSettings(tensors_of=tensors_of, init=init, **settings),
        name="batches",
        start_method=start_method,
    )


def items(worker):
    """The items of an epoch, as lists."""
    epoch, seen = worker.begin(), []
    while True:
        try:
            seen.append(worker.next(epoch).tolist())
        except StopIteration:
            return seen


class Unpickled:
    """One sample: the state of the process that has unpickled this data set."""

    def __getstate__(self):
        return {"state": None}

    def __setstate__(self, state):
        self.state = [initialised, "poptorch" in sys.modules]

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return torch.tensor(self.state)


def print_items(start_method):
    """Print the sample of the other process, and whether this one has imported PopTorch."""
    worker = started(Unpickled(), start_method)
    print(items(worker), "poptorch" in sys.modules)
    worker.stop()


@pytest.mark.few(1)
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_process_is_initialised_before_its_data_and_imports_no_poptorch(start_method):
    code = f"import tests.batches.test_worker_process as t; t.print_items({start_method!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[[True, False]] False\n", done.stderr


@pytest.mark.usefixtures("clean")
def test_an_epoch_ends_the_one_before_and_a_stop_ends_all():
    worker = started(list(torch.arange(3)), "fork")
    worker.wait_for_first()
    first = worker.begin()
    assert worker.next(first).item() == 0
    assert items(worker) == items(worker) == [0, 1, 2]
    with pytest.raises(BatchError, match="another iteration") as caught:
        worker.next(first)
    assert caught.value.id == "loader"
    worker.stop()
    assert not alive(worker.pid)
    with pytest.raises(WorkerDied, match=f"process {worker.pid} was stopped"):
        worker.next(worker.begin())


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("keep_last", [False, True])
def test_rows_are_cut_into_items(keep_last):
    worker = started(torch.arange(9).split(2), "fork", size=4, keep_last=keep_last)
    last = [[8]] if keep_last else []
    assert items(worker) == items(worker) == [[0, 1, 2, 3], [4, 5, 6, 7], *last]
    worker.stop()
