"""Check that ranks which are processes carry messages, and notice signals and lost ranks."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from ipu_dynamo.program import TensorType
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.ranks import torch_transport
from ipu_dynamo.runtime.ranks.replica_sums import ReplicaSums
from ipu_dynamo.runtime.ranks.torch_transport import TorchTransport
from ipu_dynamo.runtime.ranks.vote import vote
from ipu_dynamo.runtime.ranks.wires import Wires
from tests.ranks.mesh import world
from tests.ranks.transport_checks import CHECKS

ENDS = 60  # seconds


@contextmanager
def processes(folder, mesh, *functions):
    """Start the ranks of a mesh, in its order; none of them is there afterwards."""
    rows, columns = map(int, mesh.split("x"))
    ranks = range(rows * columns)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.gloo_rank", folder, str(rank), mesh, *functions],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in [(place - 1) % len(ranks) for place in ranks]
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x1", "2x2"])
def test_processes_pass_the_checks_of_transports(tmp_path, mesh):
    names = [check.__name__ for check in CHECKS]
    with processes(tmp_path, mesh, *names) as started:
        for process in started:
            output, _ = process.communicate(timeout=ENDS)
            assert output.splitlines() == [f"{name} done" for name in names]
            assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["in_a_collective", "for_a_message"])
def test_a_rank_that_waits_notices_ctrl_c_at_once_and_others_that_it_ended(tmp_path, waits):
    with processes(tmp_path, "2x1", f"wait_{waits}") as (first, second):
        assert first.stdout.readline() == "waits\n"
        first.send_signal(signal.SIGINT)
        output, _ = first.communicate(timeout=ENDS)
        assert output == "interrupted\n"
        output, _ = second.communicate(timeout=ENDS)
        assert "RankLost" in output
        assert [first.returncode, second.returncode] == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["in_a_collective", "for_a_message"])
def test_a_killed_rank_is_an_error_of_the_one_that_waits(tmp_path, waits):
    with processes(tmp_path, "2x1", f"wait_{waits}") as (first, second):
        assert first.stdout.readline() == "waits\n"
        second.kill()
        output, _ = first.communicate(timeout=ENDS)
        *_, error, rank = output.splitlines()
        assert error.startswith("RankLost rank 1 is gone: a connection between ranks has ended: ")
        assert rank == f"  rank: 1 ({socket.gethostname()})"
        assert first.returncode == 4


def test_a_rank_that_waits_for_the_first_contact_says_so_once(monkeypatch, caplog):
    def connect(self):
        while not caplog.messages:
            time.sleep(0.01)
        time.sleep(0.1)
        whole(self)

    whole = TorchTransport._connect
    monkeypatch.setattr(torch_transport, "_PATIENT", 0.0)
    monkeypatch.setattr(torch_transport, "_LOOK", 0.02)
    monkeypatch.setattr(TorchTransport, "_connect", connect)
    caplog.set_level(logging.WARNING, "ipu_dynamo")
    with world(2, 1):
        transport = TorchTransport(Share(2, 1, 1, 0), range(2))
        transport.maximum("mesh", torch.tensor([0]))
    (line,) = caplog.messages
    assert re.search(r"rank 1 has waited \d+ s to connect to the others\. All ranks", line)


@pytest.mark.parametrize("place", [0, 1023])
def test_a_dry_run_of_1024_ranks_makes_all_calls_in_one_process(place):
    """Messages arrive nowhere, so nothing is said of values."""
    with world(1024, place):
        transport = TorchTransport(Share(256, 4, *divmod(place, 4)), range(1024))
        wires = Wires(transport, 0)
        wires.expect(place ^ 1, 0, 0, 2, TensorType(torch.float32, (3,)))
        for _ in range(2):
            wires.post(place ^ 1, 0, 0, torch.ones(3))
            wires.wait(place ^ 1, 0, 0)
            assert wires.take(place ^ 1, 0, 0).shape == (3,)
        wires.complete()
        ReplicaSums([[torch.ones(50_000), torch.ones(2).double()]], 256, transport)()
        assert vote(transport) == []
