"""Check that ranks compare weights, states and random numbers when they are asked to.

Ranks are threads of this process, with messages in memory.
"""

import pytest
import torch

from ipu_dynamo import Options, compile_inference
from ipu_dynamo.errors import RankFailed, RanksDiffer
from ipu_dynamo.program.ir.constants import digest
from ipu_dynamo.testing.rank_threads import run_ranks, transport_here
from ipu_dynamo.whole_step import ranks
from ipu_dynamo.whole_step.weights import weight_exchange
from tests.ranks.struck import Net, Training


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())
    monkeypatch.setattr(ranks, "share_of", lambda _: transport_here() and transport_here().share)


def writes_data(training):
    training.model.layers[1].bias.data.add_(1)  # torch counts no write


def writes_a_state(training):
    name = "layers.1.weight..exp_avg"
    value = torch.ones_like(training.step.executable.whole(name))
    training.step.executable.write({name: value})


def sets_random_state(training):
    training.step.set_random_state(4)


@pytest.mark.parametrize(
    ("write", "name", "holders"),
    [
        (writes_data, "layers.1.bias", [1, 3]),
        (writes_a_state, "layers.1.weight..exp_avg", [1, 3]),
        (sets_random_state, r"random states \(seed, step\)", [0, 1, 2, 3]),
    ],
)
def test_the_tensor_that_one_rank_has_for_itself_is_named_on_all(write, name, holders):
    def run(transport):
        training, rank = Training(), transport.share.rank
        training.step(training.rows(0))
        training.step.check_ranks()
        if rank == 3:
            write(training)
        with pytest.raises(RanksDiffer, match=f"ranks have different {name}\n") as caught:
            training.step.check_ranks()
        if rank != 3:
            write(training)
        training.step.check_ranks()
        training.step(training.rows(1))
        return caught.value.values

    first, *others = run_ranks(2, 2, run)
    assert [*first] == holders
    assert len({*first.values()}) == 2
    assert all(other == first for other in others)


def test_a_rank_that_cannot_read_its_weights_is_named_on_all_others(monkeypatch):
    def breaks(tensor):
        if transport_here().share.rank == 0 and not failed:
            failed.append(tensor)
            raise MemoryError
        return digest(tensor)

    def run(transport):
        training = Training()
        training.step(training.rows(0))
        with pytest.raises((MemoryError, RankFailed)) as caught:
            training.step.check_ranks()
        training.step(training.rows(1))
        training.step.check_ranks()
        return caught.type, getattr(caught.value, "rank", None)

    failed = []
    monkeypatch.setattr(weight_exchange, "digest", breaks)
    assert run_ranks(2, 1, run) == [(MemoryError, None), (RankFailed, 0)]


def test_ranks_that_infer_apart_have_their_own_random_states_and_the_same_weights():
    def run(transport):
        model, rank = Net(), transport.share.rank
        step = compile_inference(model, Options("eager", replicas=2))
        for _ in range(1 + rank):
            step(torch.ones(2, 6))
        step.check_ranks()
        model.layers[0].bias.data.add_(rank)
        step.write_weights()
        with pytest.raises(RanksDiffer, match=r"layers\.0\.bias"):
            step.check_ranks()
        return step.random_state[1]

    assert run_ranks(2, 1, run) == [1, 2]


def test_one_process_has_no_rank_to_compare_with():
    training = Training()
    training.step.check_ranks()
    training.step(training.rows(0))
    training.step.check_ranks()
