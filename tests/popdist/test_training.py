"""Check that instances train as one process does, and what several processes need."""

import shlex
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import poptorch
from tests.popdist import processes
from tests.ranks.mesh import world

TRAIN = processes.PROGRAMS / "train.py"


def executor(options, *, training=True):
    """An executor of a small model."""
    if not training:
        return poptorch.inferenceModel(nn.Linear(2, 2), options)

    class Trained(nn.Linear):
        def forward(self, x):
            return poptorch.identity_loss(super().forward(x), reduction="sum")

    model = Trained(2, 2)
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "IPU_DYNAMO_MESH"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_training_over_processes_needs_a_process_group():
    options = poptorch.Options().replicationFactor(2)
    options.Distributed.configureProcessId(1, 2)
    with pytest.raises(
        poptorch.Error, match=r"there is no process group: call popdist.init\(\)"
    ) as e:
        executor(options)(torch.zeros(2, 2))
    assert "`poprun --num-instances 2 --num-replicas 4 python program.py`" in e.value.message
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(poptorch.Error, match="the process group has 1 processes"):
        executor(options)(torch.zeros(2, 2))


def test_inference_without_a_process_group_runs_alone():
    options = poptorch.Options().replicationFactor(2)
    options.Distributed.configureProcessId(1, 2)
    alone = executor(options, training=False)
    assert alone(torch.zeros(2, 2)).shape == (2, 2)


def test_replicas_that_exchange_tensors_need_a_process_group():
    options = poptorch.Options().replicationFactor(2)
    options.Distributed.configureProcessId(1, 2)

    def reduced(x):
        name, domain = "ReplicatedAllReduceTP", "ai.graphcore"
        attributes = {"op": "sum", "backwards": 0}
        return poptorch.custom_op([x], name, domain, 1, [x], attributes)[0]

    with pytest.raises(poptorch.Error, match="in 2 processes that no process group connects"):
        poptorch.inferenceModel(reduced, options)(torch.zeros(2, 2))


@pytest.mark.parametrize("training", [False, True])
def test_a_saved_program_trains_in_one_process(training, tmp_path):
    torch.manual_seed(0)
    alone = executor(poptorch.Options(), training=training)
    expected = alone(torch.ones(1, 2))
    alone.save(tmp_path / "saved", export_model=False)
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    torch.manual_seed(0)
    with world(2):
        several = executor(options, training=training)
        if training:
            with pytest.raises(poptorch.Error, match="in one process, and this executor runs in 2"):
                several.loadExecutable(tmp_path / "saved")
        else:
            several.loadExecutable(tmp_path / "saved")
            assert torch.equal(several(torch.ones(1, 2)), expected)


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        ("2x1", "has 2 rows of processes, but Options.Distributed says 1"),
        ("1x2", "needs 2 processes, but RANK and WORLD_SIZE .* say 1"),
        ("two", "must be the number of processes .*, got 'two'"),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_a_mesh_that_does_not_fit_is_refused(mesh, reason, training, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_MESH", mesh)
    with pytest.raises(poptorch.Error, match=reason):
        executor(poptorch.Options(), training=training)(torch.zeros(1, 2))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.parametrize("columns", [1, 2])
def test_two_instances_train_with_the_bits_of_one_process(tmp_path, columns):
    alone = processes.run(sys.executable, str(TRAIN), str(tmp_path / "alone"), OMP_NUM_THREADS="1")
    assert alone.returncode == 0, alone.stderr
    words = "--num-instances 2 --num-replicas 4 --ipus-per-replica 2"
    train = sys.executable, str(TRAIN), str(tmp_path / "two")
    two = processes.poprun(*shlex.split(words), *train, IPU_DYNAMO_MESH=f"2x{columns}")
    assert two.returncode == 0, two.stderr
    (whole,) = (torch.load(file, weights_only=False) for file in tmp_path.glob("alone.*"))
    ranks = range(2 * columns)
    parts = [torch.load(tmp_path / f"two.{rank}", weights_only=False) for rank in ranks]

    def equal(one, other):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)

    own = {name for name in whole["model"] if "running" in name}  # of each replica
    equal(parts[0]["model"], whole["model"])
    for part in parts:
        assert part["optimizer"].keys() == whole["optimizer"].keys()
        equal(part["optimizer"]["ipu_state"], whole["optimizer"]["ipu_state"])
        for name in whole["model"].keys() - own:
            equal(part["model"][name], whole["model"][name])
    for call, results in enumerate(whole["results"]):
        for place, value in enumerate(results):
            by_replica = value.unflatten(0, (-1, 4, len(value) // 32))
            for rank, part in enumerate(parts):
                first = 2 * (rank // columns)
                rows = by_replica[:, first : first + 2].flatten(0, 2)
                equal(part["results"][call][place], rows)
    # instance 1 validates with its own statistics of batches: weights are those of all
    assert parts[-1]["scores"].shape == (whole["scores"].shape[0] // 2, 3)
