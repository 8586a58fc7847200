"""Check that schedules which workers cannot follow are refused, and say where."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_dynamo import BeginBlock, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.errors import CompileError
from ipu_dynamo.program.schedule.schedule import Schedule

PIPELINE = Strategy("pipelined")


class Skipping(nn.Module):
    """Three stages; the second and the third read what the first makes, and nothing else."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (BeginBlock(nn.Linear(4, 4), ipu_id=ipu) for ipu in range(3))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(h), self.c(h)


class Trained(nn.Module):
    """Two stages and a loss."""

    def __init__(self, ipus=2):
        super().__init__()
        self.layers = nn.ModuleList(BeginBlock(nn.Linear(4, 4), ipu_id=i) for i in range(ipus))

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.mse_loss(h, x)


def compiled(kind, workers):
    """A model of four micro-batches, compiled."""
    if kind == "inference":
        options = Options("eager", device_iterations=4, strategy=PIPELINE, workers=workers)
        run = compile_inference(Skipping(), options)
    else:
        model = Trained(1 if kind == "deferred" else 2)
        more = {"side_by_side": True} if kind == "deferred" else {"strategy": PIPELINE}
        options = Options("eager", gradient_accumulation=4, workers=workers, **more)
        run = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    run.compile(torch.ones(8, 4))
    return run


@functools.cache
def executable(kind):
    """An executable of four micro-batches, on two workers or more."""
    return compiled(kind, 3 if kind == "inference" else 2).executable


@pytest.mark.parametrize("kind", ["deferred", "training", "inference"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_schedule_is_checked_once_before_several_workers_follow_it(kind, workers, monkeypatch):
    checked = []

    def note(schedule, program, *, adds=False, replicas=None):
        checked.append((schedule, adds))

    monkeypatch.setattr(Schedule, "check", note)
    run = compiled(kind, workers)
    assert len(run.schedule.passes) == len(run.executable.schedule.passes)  # not checked
    followed = (run.executable.schedule, kind == "deferred")
    assert checked == ([followed] if workers > 1 else [])


def refusal(kind, *edits, **settings):
    """What is said of the schedule with pieces of its text replaced."""
    running = executable(kind)
    program, deferred = running.host_program.runs, kind == "deferred"
    running.schedule.check(program, adds=deferred)
    text = str(running.schedule)
    for old, new in edits:
        assert old in text, text
        text = text.replace(old, new, 1)
    schedule = Schedule.parse(text)
    with pytest.raises(CompileError) as error:
        schedule.check(program, **({"adds": deferred} | settings))
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "edits", "wanted"),
    [
        (
            "training",
            [("0F0 0F0>1FB", "0B<1FB0 0F0 0F0>1FB"), (" 0B<1FB0 0B0", " 0B0")],
            r"cannot finish: stage 0 waits for %\S+ of stage 1 on micro-batch 0.*worker 0",
        ),
        (
            "training",
            [("1FB<0F2 ", "")],
            r"1FB2 of worker 1 needs %\S+ of stage 0 on micro-batch 2.*neither made nor received",
        ),
        ("training", [("0F0 0F0>1FB", "0F0>1FB 0F0")], "0F0>1FB of worker 0 does not wait for 0F0"),
        ("training", [("0F1>1FB", "0F1>1FB 0F1>1FB")], "0F1>1FB of worker 0 was sent before"),
        ("training", [("1FB<0F1", "1FB<0F1 1FB<0F1")], "1FB<0F1 of worker 1 was received before"),
        ("training", [(" 0B3", "")], "no worker runs 0B3"),
        ("training", [("0F1 ", "0F1 0F1 ")], "0F1 runs twice"),
        ("training", [("0F1 ", "0F1 0F4 ")], "0F4 is of micro-batch 4.*has 4 micro-batches"),
        ("training", [("0F1 ", "0F1 r1:0F1 ")], "r1:0F1 is of micro-batch 1, replica 1;.*1 replic"),
        ("training", [("0F1 ", "0F1 add1 ")], "add1 of worker 0: the passes of this program add"),
        (
            "training",
            [("0F0 0F0>1FB", "0F1 0F0 0F0>1FB"), ("| 0F1 ", "| ")],
            r"stage 0 runs @\S+ on micro-batch 0 after micro-batch 1 .0F0 of worker 0",
        ),
        (
            "training",
            [("0B<1FB0 0B0 ", ""), ("0F3 0F3>1FB", "0F3 0F3>1FB 0B<1FB0 0B0")],
            "the stash of stage 0 on IPU 0 is too shallow: it holds %x, %tanh of 3 "
            "micro-batches, and the schedule needs 4",
        ),
        (
            "training",
            [("0B: @backward0", "0B: @other")],
            "is of another program: its pass 2 is.*ot",
        ),
        ("inference", [("0F<1F0 ", "")], "no worker receives 1F0>0F"),
        (
            "inference",
            [(" 1F1>2F", ""), ("2F<1F1 ", "")],
            r"2F1 of worker 2 does not wait for 1F1, @\S+ of stage 1",
        ),
        ("deferred", [("0FB<0FB1 ", "")], "add2 of worker 0 adds gradients before.*micro-batch 1"),
        ("deferred", [(" add3", "")], "no worker adds gradients by add3"),
        ("deferred", [("add1 ", "add1 add1 ")], "add1 of worker 1 adds gradients twice"),
        (
            "deferred",
            [(" add2", ""), ("0FB<0FB2 ", "0FB<0FB2 add2 ")],
            "add2 of worker 1: another worker has the gradients",
        ),
        ("deferred", [("0FB0 add0", "add0 0FB0")], "add0 of worker 0 does not wait for 0FB0"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(kind, edits, wanted):
    assert re.search(wanted, refusal(kind, *edits), re.DOTALL), refusal(kind, *edits)


def test_passes_that_write_variables_take_micro_batches_in_order_on_any_worker():
    """A third worker, with the second micro-batch of a stage that adds gradients itself."""
    program = executable("training").host_program.runs
    schedule = Schedule.parse(str(executable("training").schedule))
    first, second = schedule.workers
    cut = next(i for i, action in enumerate(second) if action.micro_batch == 2)
    half = next(i for i, action in enumerate(second) if action.micro_batch == 1)
    moved = Schedule(
        schedule.passes,
        (first, second[:half] + second[cut:], second[half:cut]),
        schedule.transfers,
    )
    with pytest.raises(
        CompileError, match=r"stage 1 runs @.* on micro-batch 2 before micro-batch 1"
    ):
        moved.check(program)
