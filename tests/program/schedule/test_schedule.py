"""Check that pipelines are scheduled as on the machine, and that impossible ones are refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import BeginBlock, Options, Strategy, compile_inference
from ipu_dynamo.program import Call
from ipu_dynamo.program.schedule.planning import pipelined, sequential
from ipu_dynamo.program.schedule.schedule import Schedule

STASH = {2: [3, 1], 3: [5, 3, 1], 4: [7, 5, 3, 1]}  # PopTorch's table: copies by stage


def call(name, ipu, stage, direction, *, reads=(), makes=()) -> Call:
    return Call(name, ipu, stage, direction, tuple(reads), tuple(makes), "model.py:1")


def training_calls(stages: int) -> list[Call]:
    """Forward of all stages but the last, the last one's two passes, backward in reverse."""
    last = stages - 1
    forward = [
        call(f"forward{s}", s, s, "forward", reads=[f"h{s}"], makes=[f"h{s + 1}"])
        for s in range(last)
    ]
    backward = [
        call(f"backward{s}", s, s, "backward", reads=[f"h{s}", f"d{s + 1}"], makes=[f"d{s}"])
        for s in reversed(range(last))
    ]
    ends = {"reads": [f"h{last}"], "makes": [f"d{last}"]}
    return [*forward, call(f"step{last}", last, last, "forward_backward", **ends), *backward]


def test_shows_the_pipeline():
    schedule = pipelined(training_calls(2), micro_batches=4)
    assert schedule.grid() == ("ipu0  0  1   2 0'  3 1'  2'  3'\nipu1  .  0*  1*    2*    3*  .")


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_keeps_as_many_micro_batches_as_the_machine(stages):
    schedule = pipelined(training_calls(stages), micro_batches=3 * stages)
    assert list(schedule.stash().values()) == STASH[stages]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_ramps_up_and_down_once(stages):
    schedule = pipelined(training_calls(stages), micro_batches=9)
    assert schedule.cycles == 9 + (2 * stages - 1) - 1


@given(
    stages=st.integers(1, 4),
    micro_batches=st.integers(1, 9),
    replicas=st.integers(1, 3),
    workers=st.integers(1, 5),
)
def test_runs_every_task_once_in_an_order_that_finishes(stages, micro_batches, replicas, workers):
    calls = training_calls(stages)
    schedule = pipelined(calls, micro_batches=micro_batches, replicas=replicas, workers=workers)
    tasks = [(t.index, t.micro_batch, t.replica) for of in schedule.runs for t in of]
    assert len(schedule.workers) <= workers
    assert len(tasks) == len(set(tasks)) == len(calls) * micro_batches * replicas
    assert list(map(len, schedule.timed().workers)) == list(map(len, schedule.workers))
    for of in schedule.runs:  # an accumulator sums in the order of micro-batches
        for index in range(len(calls)):
            for replica in range(replicas):
                order = [t.micro_batch for t in of if (t.index, t.replica) == (index, replica)]
                assert order == sorted(order)


def test_one_worker_finishes_each_micro_batch_first():
    (tasks,) = sequential(training_calls(2), micro_batches=2).workers
    assert [(t.micro_batch, t.index) for t in tasks] == [(m, c) for m in (0, 1) for c in range(3)]


FORWARD = (
    call("forward0", 0, 0, "forward", reads=["x"], makes=["h"]),
    call("forward1", 1, 1, "forward", reads=["h"], makes=["y"]),
)


def test_an_inference_waits_for_its_readers():
    """A channel of two: stage 0 begins a micro-batch when stage 1 has done the one two before."""
    lines = str(pipelined(FORWARD, micro_batches=4)).splitlines()
    assert lines[3:] == [
        "  0F>1F: %h",
        "  1F>0F: order only",
        "  worker 0: 0F0 0F0>1F | 0F1 0F1>1F | 0F<1F0 0F2 0F2>1F | 0F<1F1 0F3 0F3>1F",
        "  worker 1:  | 1F<0F0 1F0 1F0>0F | 1F<0F1 1F1 1F1>0F | 1F<0F2 1F2 | 1F<0F3 1F3",
    ]
    transfers = pipelined(training_calls(2), micro_batches=4).transfers
    assert all(one.source < one.target for one in transfers)


def test_a_value_is_sent_once_to_each_ipu_that_reads_it():
    """Stage 2 reads what stages 0 and 1 make; stage 3, on its IPU, needs no more."""
    calls = [
        call("a", 0, 0, "forward", makes=["h", "skip"]),
        call("b", 1, 1, "forward", reads=["h"], makes=["i"]),
        call("c", 2, 2, "forward", reads=["i", "skip"], makes=["j"]),
        call("d", 1, 3, "forward", reads=["j", "h"], makes=["k"]),
        call("e", 2, 4, "forward", reads=["k", "skip"]),
    ]
    schedule = Schedule.of_runs(
        calls, pipelined(calls, micro_batches=2).runs, [(), (0,), (0, 1), (0, 2), (0, 3)]
    )
    names = [(t.source, t.target, t.values) for t in schedule.transfers]
    assert names == [
        (0, 1, ("h",)),
        (0, 2, ("skip",)),
        (1, 2, ("i",)),
        (2, 3, ("j",)),
        (3, 4, ("k",)),
    ]


@pytest.mark.parametrize(
    ("ipus", "cycles", "split"),
    [([0], 24, 24), ([0, 1], 27, 25), ([0, 1, 2], 30, 26), ([0, 1, 0, 1], 51, 49)],
)
def test_time_counts_passes(ipus, cycles, split):
    """8 micro-batches of 3 passes in each stage; an IPU with two stages has twice as many."""
    calls, apart = [], []
    for one in training_calls(len(ipus)):
        one = replace(one, ipu=ipus[one.stage])
        calls.append(one)
        apart.append(one)
        if one.direction != "forward" and one.stage > 0:
            apart.append(replace(one, function=f"weights{one.stage}", direction="weights"))
    assert pipelined(calls, micro_batches=8).timed().cycles == cycles
    timed = pipelined(apart, micro_batches=8).timed()
    assert timed.cycles == split
    work = sum(task.length for of in timed.runs for task in of)
    assert work == 24 * len(ipus)
    assert timed.idle == pytest.approx(1 - work / (split * len({*ipus})))


def test_weight_gradients_of_the_last_micro_batches_come_last():
    """An IPU whose backward passes end d slots early keeps d + 1 micro-batches, by then."""
    calls = []
    for one in training_calls(3):
        calls.append(one)
        if one.direction != "forward" and one.stage > 0:
            calls.append(replace(one, function=f"weights{one.stage}", direction="weights"))
    schedule = pipelined(calls, micro_batches=6)
    orders = [
        [(task.micro_batch, calls[task.index].direction == "weights") for task in tasks]
        for tasks in schedule.runs
    ]
    assert orders[1][-4:] == [(4, False), (5, False), (4, True), (5, True)]
    assert orders[2] == [
        *((m, late) for m in range(3) for late in (False, True)),
        *((m, False) for m in (3, 4, 5)),
        *((m, True) for m in (3, 4, 5)),
    ]
    assert schedule.stash() == {0: 5, 1: 3, 2: 3}


def test_shows_passes():
    schedule = pipelined(training_calls(2), micro_batches=3).timed()
    assert schedule.grid() == (
        "ipu0  0  1   2  .  0'  -  .  1'  -  .  2'  -\nipu1  .  0*  -  -  1*  -  -  2*  -  -  .   ."
    )


def test_users_reach_the_schedule_of_the_ipus():
    model = nn.Sequential(nn.Linear(4, 4), BeginBlock(nn.Linear(4, 4), ipu_id=1))
    chosen = {"engine": "eager", "device_iterations": 3, "replicas": 2, "workers": 1}
    for kind, text in [
        ("sharded", "worker 0  0  0  r1:0  r1:0  1  1  r1:1  r1:1  2  2  r1:2  r1:2"),
        (
            "pipelined",
            "ipu0 of replica 0  0  1  2  .\nipu1 of replica 0  .  0  1  2\n"
            "ipu0 of replica 1  0  1  2  .\nipu1 of replica 1  .  0  1  2",
        ),
    ]:
        program = compile_inference(model, Options(**chosen, strategy=Strategy(kind)))
        program.compile(torch.randn(12, 4))
        assert program.schedule.grid() == text
        assert len(program.executable.schedule.workers) == 1
