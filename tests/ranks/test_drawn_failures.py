"""Check that an operator that fails anywhere fails the call on all ranks, and harms nothing."""

import pytest
import torch

from ipu_dynamo.testing.rank_threads import run_ranks, transport_here
from ipu_dynamo.tune.intra_op import intra_op_threads
from ipu_dynamo.whole_step import ranks
from tests.ranks.drawn_failures import check, drawn, made
from tests.ranks.struck import run_torchrun


@pytest.fixture(autouse=True)
def one_thread():
    with intra_op_threads(1):
        yield


def check_in_memory(case, monkeypatch):
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())
    monkeypatch.setattr(ranks, "share_of", lambda _: transport_here() and transport_here().share)
    check(case, run_ranks(*case.mesh, lambda _: made(case)))


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))  # of five failures each
def test_an_operator_that_fails_anywhere_is_named_on_all_ranks_and_harms_nothing(monkeypatch, seed):
    check_in_memory(drawn(seed), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 40))
def test_many_operators_that_fail_are_named_on_all_ranks_and_harm_nothing(monkeypatch, seed):
    check_in_memory(drawn(seed), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 44))
def test_operators_that_fail_on_processes_are_named_on_all_and_harm_nothing(tmp_path, seed):
    case = drawn(seed)
    shape = "x".join(map(str, case.mesh))
    code, output = run_torchrun("fails", tmp_path, shape, 0, seed)
    assert code == 0, output
    size = case.mesh[0] * case.mesh[1]
    check(case, [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(size)])
