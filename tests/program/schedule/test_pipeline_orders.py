"""Check the orders of schedules by name: idle shares and stashes are those of the literature."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from ipu_dynamo.options.schedule_order import read_order, write_order
from ipu_dynamo.program.schedule.pipeline_clock import slots, slots_left, waits_of
from ipu_dynamo.program.schedule.pipeline_orders import order_of, runs_of_workers
from ipu_dynamo.program.schedule.planning import pipelined
from ipu_dynamo.program.schedule.stash import most_kept
from tests.program.schedule.test_schedule import call, training_calls


def calls_of(name, ipus):
    """The passes of a micro-batch of a chain of stages, as the compiler makes them for a name."""
    calls = [replace(one, ipu=ipus[one.stage]) for one in training_calls(len(ipus))]
    last = len(ipus) - 1
    if name == "gpipe" and last:
        both = calls[last]
        reads, (made,) = both.arguments, both.results
        calls[last : last + 1] = [
            call(f"forward{last}", ipus[-1], last, "forward", reads=reads, makes=["loss"]),
            call(f"backward{last}", ipus[-1], last, "backward", reads=["loss"], makes=[made]),
        ]
    if name in ("zb_h1", "zb_v", "zero_bubble"):
        calls = [
            part
            for one in calls
            for part in (one, replace(one, function=f"w{one.stage}", direction="weights"))
            if part is one or (one.direction != "forward" and one.stage > 0)
        ]
    return calls


def schedule_of(name, ipus, micro_batches):
    named = "" if name in ("grouped", "zero_bubble") else name
    return pipelined(calls_of(name, ipus), micro_batches=micro_batches, schedule=named)


def idle_of(schedule):
    """The idle share, exactly."""
    whole = schedule.timed()
    busy = sum(run.length for of in whole.runs for run in of)
    return 1 - Fraction(busy, whole.cycles * len(whole.workers))


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved", "zb_v"])
def test_idle_shares_and_stashes_are_those_of_the_papers(name, size):
    for stages in (2, 3) if name == "interleaved" else (1,):
        ipus = [*range(size)] * stages if name != "zb_v" else there_and_back(size)
        least, step = {"gpipe": 1, "zb_v": 2 * size}.get(name, size), size if stages > 1 else 1
        for count in range(least, 4 * size + 1, step):
            schedule = schedule_of(name, ipus, count)
            bubble = size - 1
            work = {"zb_h1": 3 * count, "interleaved": stages * count, "zb_v": 6 * count}
            expected = Fraction(bubble, work.get(name, count) + bubble)
            assert idle_of(schedule) == expected, (size, stages, count)
            assert schedule.idle == pytest.approx(float(expected))
            kept = list(schedule.stash().values())
            match name:
                case "gpipe":
                    assert kept == [count] * size
                case "1f1b":
                    assert kept == [min(size - s, count) for s in range(size)]
                case "zb_h1":
                    assert max(kept) <= size
                case "interleaved":
                    for r in range(size):  # of all stages of an IPU together
                        held = 2 * (size - 1 - r) + (stages - 1) * size + 1
                        assert most_held(schedule, r) == min(held, count * stages)
                case "zb_v":
                    assert kept == [2 * size - s for s in range(2 * size)]
                    assert all(most_held(schedule, r) == 2 * size for r in range(size))


def there_and_back(size):
    """The IPUs of a V of stages."""
    return [*range(size), *reversed(range(size))]


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize(
    ("name", "theirs"), [("interleaved", ScheduleInterleaved1F1B), ("zb_v", ScheduleZBVZeroBubble)]
)
def test_orders_are_those_of_torch_distributed(name, theirs, size):
    ipus = [*range(size)] * 2 if name == "interleaved" else there_and_back(size)
    for count in range(2 * size, 4 * size + 1, size if name == "interleaved" else 1):
        (stage, other) = (
            SimpleNamespace(
                num_stages=2 * size, group_size=size, group_rank=0, submod=nn.Identity()
            )
            for _ in range(2)
        )
        expected = {
            rank: [str(action).replace("I", "B") for action in actions if action is not None]
            for rank, actions in theirs([stage, other], count).pipeline_order.items()
        }
        order = order_of(name, ipus, count)
        assert {ipu: [*map(str, tasks)] for ipu, tasks in order.items()} == expected
        assert read_order(write_order(order)) == order  # it can finish, and has each pass once


def most_held(schedule, ipu):
    """Of how many micro-batches an IPU holds values at once, counting each of its stages."""
    ends = {one.stage: index for index, one in enumerate(schedule.passes)}
    held, peak = set(), 0
    for run in schedule.runs[ipu]:
        stage = schedule.passes[run.index].stage
        held.add((stage, run.micro_batch))
        peak = max(peak, len(held))
        if run.index == ends[stage]:
            held.remove((stage, run.micro_batch))
    return peak


@given(
    ipus=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    split=st.booleans(),
    micro_batches=st.integers(0, 9),
)
def test_orders_by_slots_keep_what_slots_say(ipus, split, micro_batches):
    calls = calls_of("zero_bubble" if split else "grouped", ipus)
    when, left = slots(calls), slots_left(calls)
    count = micro_batches + len(calls)
    worker_of = {(0, ipu): n for n, ipu in enumerate(sorted(set(ipus)))}
    runs = runs_of_workers(calls, waits_of(calls), worker_of, schedule="", micro_batches=count)
    expected = {}
    for stage, ipu in enumerate(ipus):
        own = [index for index, one in enumerate(calls) if one.stage == stage]
        copies = 1 + when[own[-1]] - when[own[0]]
        if calls[own[-1]].direction == "weights":
            copies = max(copies, 1 + left[ipu])
        expected[stage] = copies
    assert most_kept([one.stage for one in calls], runs) == expected


@pytest.mark.parametrize(
    ("name", "ipus", "rows"),
    [
        ("gpipe", [0, 1], ["0  1  2  .  .   0'  1'  2'", ".  0  1  2  0'  1'  2'  ."]),
        ("1f1b", [0, 1], ["0  1   0'  2  1'  2'", ".  0*  1*  .  2*  ."]),
    ],
)
def test_shows_the_orders(name, ipus, rows):
    grid = schedule_of(name, ipus, 3).grid()
    assert [row.split(maxsplit=1)[1] for row in grid.splitlines()] == rows
