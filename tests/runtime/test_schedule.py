"""Check that pipelines are scheduled as on the machine, and that impossible ones are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.errors import CompileError
from ipu_dynamo.program import Call
from ipu_dynamo.runtime.schedule import Schedule, Task, in_turn, pipelined

STASH = {2: [3, 1], 3: [5, 3, 1], 4: [7, 5, 3, 1]}  # PopTorch's table: copies by stage


def call(name: str, ipu: int, stage: int, direction: str) -> Call:
    return Call(name, ipu, stage, direction, (), (), "model.py:1")  # type: ignore[arg-type]


def training_calls(stages: int) -> list[Call]:
    """Forward of all stages but the last, the last one's two passes, backward in reverse."""
    last = stages - 1
    forward = [call(f"forward{s}", s, s, "forward") for s in range(last)]
    backward = [call(f"backward{s}", s, s, "backward") for s in reversed(range(last))]
    return [*forward, call(f"step{last}", last, last, "forward_backward"), *backward]


def test_prints_the_pipeline():
    schedule = pipelined(training_calls(2), micro_batches=4)
    assert str(schedule) == (
        "worker 0  0  1   2 0'  3 1'  2'  3'\nworker 1  .  0*  1*    2*    3*  ."
    )


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
    (tasks,) = in_turn(training_calls(2), micro_batches=2).workers
    assert [(t.micro_batch, t.call) for t in tasks] == [(m, c) for m in (0, 1) for c in range(3)]


def test_refuses_tasks_that_wait_for_each_other():
    calls = (call("forward0", 0, 0, "forward"), call("forward1", 1, 1, "forward"))
    first, second = Task(0, 0, 0), Task(0, 1, 0)
    schedule = Schedule(calls, ((first,), (second,)), ((1,), (0,)))
    with pytest.raises(CompileError, match=r"stage 0 waits for @forward1 of stage 1"):
        schedule.check()
