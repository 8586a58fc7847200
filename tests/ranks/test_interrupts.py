"""Check that Ctrl-C at any place ends all ranks, or one call, with weights of a complete step."""

import pytest
import torch

from ipu_dynamo import Options
from tests.ranks.struck import PLACES, Places, Training, run_torchrun

WHOLE, COMMIT = "tensors", "deciding"  # from the arguments on, and from the vote of the step on


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


@pytest.mark.slow
@pytest.mark.parametrize("begins", [WHOLE, COMMIT])
@pytest.mark.parametrize("shape", ["2x1", "1x2", "2x2"])
def test_ctrl_c_at_one_rank_ends_one_call_on_all(tmp_path, shape, begins):
    code, output = run_torchrun("interrupted_alone", tmp_path, shape, 0, begins)
    assert code == 0, output
    rows, columns = map(int, shape.split("x"))
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(rows * columns)]
    training = Training()
    for number in range(3):
        training.step(training.rows(number))
    undone = 0
    for place, outcomes in enumerate(zip(*(each["outcomes"] for each in found), strict=True)):
        (steps,) = {made for _, _, made in outcomes}
        for ends, is_struck, _ in outcomes:
            if is_struck:
                assert ends == "KeyboardInterrupt", (place, outcomes)
            else:
                assert ends == ("returns" if steps else "RankFailed"), (place, outcomes)
        undone += not steps
        if steps:
            training.step(training.rows(3 + place))
    assert 0 < undone < (PLACES if begins == WHOLE else PLACES // 4)  # those before the vote
    training.step(training.rows(3 + PLACES))
    expected = training.all()
    for each in found:
        for name, tensor in expected.items():
            assert torch.equal(each["tensors"][name], tensor), f"{name} has other bits"
