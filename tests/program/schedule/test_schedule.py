"""Check that pipelines are scheduled as on the machine, and that impossible ones are refused."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import BeginBlock, Options, Strategy, compile_inference
from ipu_dynamo.errors import CompileError
from ipu_dynamo.program import Call, Stash, TensorType
from ipu_dynamo.program.schedule.planning import pipelined, sequential
from ipu_dynamo.program.schedule.schedule import Schedule, Task

STASH = {2: [3, 1], 3: [5, 3, 1], 4: [7, 5, 3, 1]}  # PopTorch's table: copies by stage


def call(name, ipu, stage, direction, *, reads=(), makes=()) -> Call:
    return Call(name, ipu, stage, direction, tuple(reads), tuple(makes), "model.py:1")


def training_calls(stages: int) -> list[Call]:
    """Forward of all stages but the last, the last one's two passes, backward in reverse."""
    last = stages - 1
    forward = [call(f"forward{s}", s, s, "forward") for s in range(last)]
    backward = [call(f"backward{s}", s, s, "backward") for s in reversed(range(last))]
    return [*forward, call(f"step{last}", last, last, "forward_backward"), *backward]


def test_prints_the_pipeline():
    schedule = pipelined(training_calls(2), micro_batches=4)
    assert str(schedule) == ("ipu0  0  1   2 0'  3 1'  2'  3'\nipu1  .  0*  1*    2*    3*  .")


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
    tasks = [(t.call, t.micro_batch, t.replica) for of in schedule.workers for t in of]
    assert len(schedule.workers) <= workers
    assert len(tasks) == len(set(tasks)) == len(calls) * micro_batches * replicas
    for of in schedule.workers:  # an accumulator sums in the order of micro-batches
        for index in range(len(calls)):
            for replica in range(replicas):
                order = [t.micro_batch for t in of if (t.call, t.replica) == (index, replica)]
                assert order == sorted(order)


def test_one_worker_finishes_each_micro_batch_first():
    (tasks,) = sequential(training_calls(2), micro_batches=2).workers
    assert [(t.micro_batch, t.call) for t in tasks] == [(m, c) for m in (0, 1) for c in range(3)]


FORWARD = (
    call("forward0", 0, 0, "forward", reads=["x"], makes=["h"]),
    call("forward1", 1, 1, "forward", reads=["h..on1"], makes=["y"]),
)


def test_refuses_tasks_that_wait_for_each_other():
    first, second = Task(0, 0, 0), Task(0, 1, 0)
    schedule = Schedule(FORWARD, ((first,), (second,)), ((1,), (0,)))
    with pytest.raises(CompileError, match="cannot finish: stage 0 waits for @forward1 of stage 1"):
        schedule.check()


def test_refuses_a_value_that_is_read_before_it_is_made():
    """One worker would run stage 1 first; nothing says that it waits."""
    tasks = (Task(0, 1, 0), Task(1, 0, 0))
    with pytest.raises(CompileError, match="stage 1 waits for %h of stage 0 on micro-batch 0"):
        Schedule(FORWARD, (tasks,), ((), ())).check()


def test_an_inference_waits_for_its_readers():
    schedule = pipelined(FORWARD, micro_batches=4)
    assert [schedule.needs(Task(m, 0, m)) for m in range(4)] == [[], [], [(1, 0)], [(1, 1)]]
    assert schedule.needs(Task(3, 1, 2)) == [(0, 2)]
    assert pipelined(training_calls(2), micro_batches=4).readers == ()


def test_refuses_a_value_that_is_never_made():
    with pytest.raises(CompileError, match="stage 1 waits for %h of stage 0 on micro-batch 3"):
        Schedule(FORWARD, ((Task(0, 1, 3),),), ((), ())).check()


def test_refuses_a_stage_that_waits_for_itself():
    looped = call("forward0", 0, 0, "forward", reads=["h"], makes=["h"])
    schedule = Schedule((looped,), ((Task(0, 0, 0),),), ((),))
    with pytest.raises(CompileError, match="stage 0 waits for itself: @forward0 needs %h") as error:
        schedule.check()
    assert "model.py:1" in str(error.value)
    with pytest.raises(CompileError, match="stage 1 waits for itself: @forward1 needs @forward1"):
        Schedule(FORWARD, ((Task(0, 0, 0),), (Task(1, 1, 0),)), ((), (1,))).check()


def test_refuses_micro_batches_out_of_order():
    with pytest.raises(CompileError, match="stage 0 runs @forward0 on micro-batch 0 after micro-b"):
        Schedule(FORWARD, ((Task(0, 0, 1), Task(1, 0, 0)),), ((), ())).check()


@given(stages=st.integers(2, 4), stage=st.integers(0, 2), less=st.integers(1, 3))
def test_refuses_a_stash_that_is_too_shallow(stages, stage, less):
    stage = min(stage, stages - 2)
    wanted = STASH[stages][stage]
    holds = max(1, wanted - less)
    stash = Stash(stage, stage, holds, (("h", TensorType(torch.float32, (2, 8))),))
    calls = training_calls(stages)
    pipelined(calls, micro_batches=9, stashes=[replace(stash, copies=wanted)])
    with pytest.raises(CompileError) as error:
        pipelined(calls, micro_batches=9, stashes=[stash])
    assert (
        f"the stash of stage {stage} on IPU {stage} is too shallow: it holds %h of {holds} "
        f"micro-batches, and the schedule needs {wanted}"
    ) in str(error.value)


@given(
    stages=st.integers(1, 4),
    micro_batches=st.integers(1, 9),
    replicas=st.integers(1, 2),
    workers=st.integers(1, 5),
)
def test_draws_a_box_for_every_task(stages, micro_batches, replicas, workers):
    calls = training_calls(stages)
    schedule = pipelined(calls, micro_batches=micro_batches, replicas=replicas, workers=workers)
    root = ElementTree.fromstring(schedule.svg())
    space = {"svg": "http://www.w3.org/2000/svg"}
    boxes = root.findall("svg:g", space)
    numbers = [box.findtext("svg:text", namespaces=space) for box in boxes]
    titles = [box.findtext("svg:title", namespaces=space) for box in boxes]
    assert len(set(titles)) == len(calls) * micro_batches * replicas
    assert sorted(map(int, numbers)) == sorted(t.micro_batch for of in schedule.workers for t in of)
    places = {
        (b.find("svg:rect", space).get("x"), b.find("svg:rect", space).get("y")) for b in boxes
    }
    assert len(places) == len(boxes)  # none lies on another
    texts = [text.text for text in root.findall("svg:text", space)]
    assert [text for text in texts if text in schedule.rows] == list(schedule.rows)
    for one in calls:
        assert any(f"stage {one.stage} on ipu{one.ipu}" in text for text in texts)
    assert not [e for e in root.iter() if "href" in str(e.attrib)]  # it stands alone


def test_a_drawing_escapes_what_users_wrote():
    nasty = replace(FORWARD[0], function="f<0>&", source='m.py:1 in f: a < b and "<script>"')
    text = sequential([nasty], micro_batches=1).svg()
    assert "<script>" not in text
    assert "@f<0>&" in "".join(ElementTree.fromstring(text).itertext())


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
    work = sum(task.length for of in timed.workers for task in of)
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
        [(task.micro_batch, calls[task.call].direction == "weights") for task in tasks]
        for tasks in schedule.workers
    ]
    assert orders[1][-4:] == [(4, False), (5, False), (4, True), (5, True)]
    assert orders[2] == [
        *((m, late) for m in range(3) for late in (False, True)),
        *((m, False) for m in (3, 4, 5)),
        *((m, True) for m in (3, 4, 5)),
    ]
    assert schedule.stash() == {0: 5, 1: 3, 2: 3}


def test_prints_passes():
    schedule = pipelined(training_calls(2), micro_batches=3).timed()
    assert str(schedule) == (
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
        assert str(program.schedule) == text
        assert len(program.executable.schedule.workers) == 1
