"""Check that a write on one rank counts for all ranks, or is refused.

Ranks are threads of this process, with messages in memory.
"""

from dataclasses import replace

import pytest
import torch

from ipu_dynamo.errors import RanksDiffer
from ipu_dynamo.testing.rank_threads import run_ranks, transport_here
from ipu_dynamo.whole_step import ranks
from tests.ranks.test_programs_of_one_model import OPTIONS, Normed, Rank

SCALED = replace(OPTIONS, loss_scale_is_variable=True)


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())


def write_weight(rank):
    rank.model.second[1].weight.detach().fill_(0.5)


def write_buffer(rank):
    rank.model.second[0].running_mean.fill_(0.5)


def write_state(rank):
    rank.optimizer.state[rank.model.second[1].weight]["exp_avg"].fill_(0.5)
    rank.step.write_optimizer_state()


def write_loss_scale(rank):
    rank.step.set_loss_scale(2.0**20)


WRITES = {
    "second.1.weight": write_weight,
    "second.0.running_mean": write_buffer,
    "second.1.weight..exp_avg": write_state,
    ".loss_scale": write_loss_scale,
}


def trained_once(transport):
    rank = Rank(transport, SCALED, Normed)
    rank.train([0])
    rank.step.read_optimizer_state()
    return rank


def has(rank):
    rank.train([1, 2])
    rank.step.read_optimizer_state()
    states = [t.clone() for of in rank.optimizer.state.values() for t in of.values()]
    return [*rank.weights(), *states]


@pytest.mark.few(3)
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_on_a_rank_that_does_not_run_the_tensor_is_refused(name, mesh):
    def run(transport):
        rank, writes = trained_once(transport), WRITES[name]
        if rank.share.rank == 0:  # the tensor is on the second IPU
            writes(rank)
        for _ in range(2):  # until all have it
            with pytest.raises(RanksDiffer, match=f"ranks have different .*{name}") as caught:
                rank.train([1])
            assert {0, 1} <= caught.value.values.keys() <= {0, 1, 3}
        if rank.share.rank:
            writes(rank)
        return has(rank)

    found = run_ranks(*mesh, run)
    rank = trained_once(None)
    WRITES[name](rank)
    for of_rank, expected in zip(zip(*found, strict=True), has(rank), strict=True):
        assert all(torch.equal(value, expected) for value in of_rank)


def test_a_write_on_a_rank_that_runs_the_tensor_counts_for_its_row():
    def run(transport):
        rank = trained_once(transport)
        if rank.share is None or rank.share.rank == 1:
            write_weight(rank)
        return has(rank)

    expected = run(None)
    for found in run_ranks(1, 2, run):
        assert all(map(torch.equal, found, expected))


def test_a_read_refuses_to_overwrite_what_one_rank_has_written():
    def run(transport):
        rank = trained_once(transport)
        if rank.share.rank == 0:
            write_weight(rank)
        with pytest.raises(RanksDiffer, match=r"different second\.1\.weight"):
            rank.step.read_weights()
        if rank.share.rank == 1:
            write_weight(rank)
        rank.step.read_weights()
        return rank.model.second[1].weight.detach().clone()

    for weight in run_ranks(1, 2, run):
        assert weight.eq(0.5).all()


def test_a_write_before_a_call_that_fails_is_noticed_after_it():
    def run(transport):
        rank = trained_once(transport)
        if rank.share.rank == 0:
            write_weight(rank)
        with pytest.raises(Exception, match="Shape mismatch"):
            rank.step(torch.zeros(5, 4))
        with pytest.raises(RanksDiffer, match=r"different second\.1\.weight"):
            rank.train([1])

    run_ranks(1, 2, run)
