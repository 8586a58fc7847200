"""Check that each rank reads the weights and states of all ranks. Ranks are threads."""

from threading import Lock

import pytest
import torch
from torch import nn

from ipu_dynamo import Block, Options, ReplicaGroups, Strategy, compile_training, identity_loss
from ipu_dynamo.testing.compare import assert_same_bits
from ipu_dynamo.testing.rank_threads import run_ranks, transport_here
from ipu_dynamo.tune.intra_op import intra_op_threads
from ipu_dynamo.whole_step import ranks

MAKING = Lock()  # torch's generator is one for all threads
REPLICAS, ACCUMULATION, ROWS = 4, 3, 2
GROUPS = {"first.weight": ReplicaGroups(2), "last.bias": ReplicaGroups(1)}


class Grouped(nn.Module):
    """Two layers on two IPUs, with weights of each group of replicas, and statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.first.weight = nn.Parameter(torch.randn(2, 5, 3))
        self.last.bias = nn.Parameter(torch.randn(REPLICAS, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Block("first", ipu_id=0):
            x = self.norm(self.first(x)).tanh()
        with Block("last", ipu_id=1):
            return identity_loss(self.last(x).square(), "mean")


def trained(x, own):
    """The weights and states that are read after two steps, with the rows that `own` takes."""
    options = Options(
        "eager",
        gradient_accumulation=ACCUMULATION,
        replicas=REPLICAS,
        replica_groups=GROUPS,
        strategy=Strategy("pipelined"),
        seed=0,
    )
    with MAKING:
        model = Grouped()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, options)
    for _ in range(2):
        step(own(x, options))
    step.read_weights()
    step.read_optimizer_state()
    return model.state_dict(), optimizer.state_dict()["state"]


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_every_rank_reads_the_weights_and_states_of_all(shape, monkeypatch):
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())
    x = torch.randn(ACCUMULATION * REPLICAS * ROWS, 3)

    def on_rank(transport):
        share = transport.share
        rows = lambda x, options: ranks.rows_of_share(x, options, share, training=True)  # noqa: E731
        return share, *trained(x, rows)

    with intra_op_threads(1):
        weights, states = trained(x, lambda x, _: x)
        found = run_ranks(*shape, on_rank)
    for share, own_weights, own_states in found:
        buffers = {name for name in weights if "running" in name and share.row > 0}
        for name in weights.keys() - buffers:  # those of a rank's own replicas differ
            assert_same_bits(own_weights[name], weights[name], f"{name} on {share}")
        for parameter, values in states.items():
            for name, value in values.items():
                assert_same_bits(own_states[parameter][name], value, f"{name} on {share}")


def test_weights_that_all_ranks_write_alike_are_the_same_without_those_of_groups(monkeypatch):
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())

    def run(transport):
        options = Options("eager", replicas=REPLICAS, replica_groups=GROUPS, seed=0)
        with MAKING:
            model = Grouped()
        step = compile_training(model, torch.optim.Adam(model.parameters(), lr=0.1), options)
        drawn = torch.Generator().manual_seed(transport.share.rank)
        for _ in range(2):  # groups of this rank have other weights from now on
            step(torch.randn(REPLICAS // transport.share.rows * ROWS, 3, generator=drawn))
            step.check_ranks()
            model.last.weight.detach().add_(1)
            step.write_weights(["last.weight"])

    run_ranks(2, 1, run)
