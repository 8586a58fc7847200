"""Check that Ctrl-C at any place ends all ranks, or one call, with weights of a complete step."""

import pytest
import torch

from ipu_dynamo import Options
from ipu_dynamo.testing.rank_threads import run_ranks, transport_here
from ipu_dynamo.whole_step import ranks
from tests.ranks.struck import PLACES, Places, Training, interrupted_calls, run_torchrun

WHOLE, COMMIT = "tensors", "deciding"  # from the arguments on, and from the vote of the step on
MESSAGE, SUMS = "_send", "_exchange"  # from the first message on, and from the sums of replicas on
FIRST = 40  # places of a call that are tried in memory


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def undisturbed():
    """The weights of one process after each step, by the number of steps."""
    training, found = Training(), {}
    for number in range(8):
        training.step(training.rows(number))
        own = training.own()
        found[own["steps"]] = own["weights"]
    return found


@pytest.mark.parametrize(("at", "calls", "strikes"), [(0, 3, 0), (1, 3, 1), (999, 3, 1), (0, 0, 0)])
def test_a_place_is_struck_once_and_at_the_end_if_there_are_fewer(at, calls, strikes):
    struck = []
    with Places(at, lambda: struck.append(at), begins="read") as places:
        for _ in range(calls):
            Options.read({"replicas": 2})
    assert len(struck) == strikes
    assert (places.count >= 0) == (calls > 0)


# 20 places, of which 10 are between the vote of the step and the end of the call
@pytest.mark.slow
@pytest.mark.parametrize("begins", [WHOLE, COMMIT])
@pytest.mark.parametrize("place", range(10))
def test_ctrl_c_at_torchrun_ends_all_ranks_with_weights_of_one_step(
    tmp_path, undisturbed, begins, place
):
    shape = ("2x2", "1x2", "2x1")[place % 3]
    rows, columns = map(int, shape.split("x"))
    rank = place % (rows * columns)
    code, output = run_torchrun("interrupted", tmp_path, shape, rank, begins, (place + 0.5) / 10)
    assert code != 0, output
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(rows * columns)]
    (steps,) = {each["steps"] for each in found}
    assert steps in (3, 4), "it was interrupted in the fourth call"
    for each in found:
        for name, tensor in each["weights"].items():
            assert torch.equal(tensor, undisturbed[steps][name]), f"{name} has other bits"
    assert {name for each in found for name in each["weights"]} == {*undisturbed[steps]}


def check_calls(found, first):
    """One call was interrupted after the other. Returns how many of them were undone.

    Args:
        found: what `interrupted_calls` has returned on each rank.
        first: the number of the first of these calls.
    """
    training, undone, number = Training(), 0, first
    for complete in range(first):
        training.step(training.rows(complete))
    for number, outcomes in enumerate(
        zip(*(each["outcomes"] for each in found), strict=True), first
    ):
        (steps,) = {made for _, _, made in outcomes}
        for ends, is_struck, _ in outcomes:
            if is_struck:
                assert ends == "KeyboardInterrupt", (number, outcomes)
            else:
                assert ends == ("returns" if steps else "RankFailed"), (number, outcomes)
        undone += not steps
        if steps:
            training.step(training.rows(number))
    training.step(training.rows(number + 1))
    expected = training.all()
    for each in found:
        for name, tensor in expected.items():
            assert torch.equal(each["tensors"][name], tensor), f"{name} has other bits"
    return undone


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("mesh", "begins"),
    [((2, 1), COMMIT), ((2, 1), SUMS), ((2, 2), WHOLE), ((1, 2), MESSAGE), ((2, 2), MESSAGE)],
)
def test_ctrl_c_at_each_of_the_first_places_ends_one_call_on_all(monkeypatch, mesh, begins):
    """Ranks are threads of this process. Rank 0 is the main thread, which gets signals."""
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())
    monkeypatch.setattr(ranks, "share_of", lambda _: transport_here() and transport_here().share)

    def run(transport):
        training = Training()
        training.step(training.rows(0))
        places = [0 if transport.share.rank else place for place in range(1, FIRST)]
        return interrupted_calls(training, 1, places, begins)

    undone = check_calls(run_ranks(*mesh, run, here=0), first=1)
    assert 0 < undone < (FIRST if begins != COMMIT else FIRST // 4)  # those before the vote


@pytest.mark.slow
@pytest.mark.parametrize("begins", [WHOLE, COMMIT])
@pytest.mark.parametrize("shape", ["2x1", "1x2", "2x2"])
def test_ctrl_c_at_one_rank_ends_one_call_on_all(tmp_path, shape, begins):
    code, output = run_torchrun("interrupted_alone", tmp_path, shape, 0, begins)
    assert code == 0, output
    rows, columns = map(int, shape.split("x"))
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(rows * columns)]
    undone = check_calls(found, first=3)
    assert 0 < undone < (PLACES if begins == WHOLE else PLACES // 4)  # those before the vote
