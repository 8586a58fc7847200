"""Check that ranks which are threads carry messages, and that none of them hangs."""

import threading
import time

import pytest
import torch

from ipu_dynamo.errors import RankLost
from ipu_dynamo.testing.rank_threads import run_failing_ranks, run_ranks, transport_here
from tests.ranks.transport_checks import (
    CHECKS,
    collectives_give_the_values_of_a_group_in_its_order,
    filled,
)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("rows", "columns"), [(3, 1), (2, 2)])
def test_messages_in_memory(check, rows, columns):
    run_ranks(rows, columns, check)


def test_a_lone_rank_exchanges_with_itself():
    run_ranks(1, 1, collectives_give_the_values_of_a_group_in_its_order)


def test_each_rank_has_its_own_transport():
    places = run_ranks(2, 2, lambda transport: (transport.share, transport_here() is transport))
    assert [(share.rank, own) for share, own in places] == [(rank, True) for rank in range(4)]
    assert transport_here() is None


def fail_on_rank_1(wait):
    def run(transport):
        if transport.share.rank == 1:
            raise KeyError("the cause")
        wait(transport)

    return run


WAITS = {
    "receive": lambda t: t.receive(1, (0, 0, 0), filled(0)).wait(),
    "send": lambda t: t.send(1, (0, 0, 0), filled(0)).wait(),
    "gather": lambda t: t.gather("mesh", filled(0)),
    # rank 2 waits for rank 0 alone, which waits for rank 1
    "chain": lambda t: t.receive((t.share.rank + 1) % 3, (0, 0, 0), filled(0)).wait(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_an_error_releases_the_ranks_that_wait_and_is_raised(wait):
    with pytest.raises(KeyError, match="the cause"):
        run_ranks(3, 1, fail_on_rank_1(wait))
    outcomes = run_failing_ranks(3, 1, fail_on_rank_1(wait))
    assert [type(outcome) for outcome in outcomes] == [RankLost, KeyError, RankLost]


def test_a_rank_that_returned_releases_others_but_its_messages_arrive():
    def run(transport):
        if transport.share.rank == 0:
            transport.send(1, (0, 0, 0), filled(7))
            return None
        time.sleep(0.01)
        message = filled(0)
        transport.receive(0, (0, 0, 0), message).wait()
        with pytest.raises(RankLost):
            transport.receive(0, (0, 0, 0), message).wait()
        return message.tolist()

    assert run_ranks(1, 2, run) == [None, [7, 7, 7]]


def test_ranks_that_wait_for_each_other_are_given_up_with_their_places():
    def run(transport):
        transport.receive(1 - transport.share.rank, (0, 0, 0), filled(0)).wait()

    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] have not ended(.|\n)*in run"):
        run_ranks(2, 1, run, seconds=0.2)
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(5)
            assert not thread.is_alive()


def test_different_collectives_of_a_group_are_refused():
    def run(transport):
        if transport.share.rank == 0:
            transport.gather("mesh", filled(0))
        else:
            transport.maximum("mesh", torch.tensor([0]))

    with pytest.raises(ValueError, match="different collectives"):
        run_ranks(2, 1, run)


def test_a_message_of_another_size_is_refused():
    def run(transport):
        if transport.share.rank == 0:
            transport.send(1, (0, 0, 0), filled(0, 3)).wait()
        else:
            transport.receive(0, (0, 0, 0), filled(0, 4)).wait()

    assert [type(error) for error in run_failing_ranks(2, 1, run)] == [ValueError, ValueError]
