"""Check that times of a schedule count what an IPU computes again, whatever this computer keeps."""

import pytest
import torch
from torch import nn

from ipu_dynamo import BeginBlock, Options, Strategy, compile_training, recomputation_checkpoint
from ipu_dynamo.program.schedule.schedule import Schedule

UNITS = {"0F": 1, "1F": 1, "2FB": 3, "1B": 2, "0B": 2}  # cycles of passes that repeat nothing


class Stages(nn.Module):
    """Three stages of two products and two activations each.

    Args:
        mark: what follows each product.
    """

    def __init__(self, mark=lambda h: h):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)]) for _ in range(3)
        )
        self.mark = mark
        for ipu, (first, _) in enumerate(self.layers):
            BeginBlock(first, ipu_id=ipu)

    def forward(self, x):
        h = x
        for first, second in self.layers:
            h = torch.tanh(self.mark(second(nn.functional.gelu(self.mark(first(h))))))
        return nn.functional.mse_loss(h, x)


def step_of(model=None, *, engine="eager", schedule="grouped", **options):
    model = Stages() if model is None else model
    chosen = {"gradient_accumulation": 6, "workers": 3, "engine": engine} | options
    strategy = Strategy(kind="pipelined", schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, Options(strategy=strategy, **chosen))
    step.compile(torch.randn(12, 32))
    return step


def lengths_of(schedule):
    return {schedule.names[r.index]: r.length for of in schedule.timed().runs for r in of}


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_pass_that_repeats_its_forward_pass_takes_a_cycle_more(engine):
    off, stages = (step_of(engine=engine, recompute=one).schedule for one in ("off", "stages"))
    assert lengths_of(off) == UNITS
    assert lengths_of(stages) == UNITS | {"1B": 3, "0B": 3}
    assert stages.timed().cycles > off.timed().cycles
    assert stages.idle == pytest.approx(1 - 6 * (4 + 4 + 3) / (3 * stages.timed().cycles))
    assert off.idle == pytest.approx(1 - 6 * 3 * 3 / (3 * off.timed().cycles))


def test_weight_gradients_repeat_nothing():
    schedule = step_of(schedule="zero_bubble", recompute="all").schedule
    assert lengths_of(schedule) == {
        **{"0F": 1, "1F": 1, "2FB": 2 + schedule.passes[2].repeats, "2W": 1},
        **{"1B": 2, "1W": 1, "0B": 3},
    }


def test_the_ipu_repeats_what_this_computer_keeps():
    step = step_of(force={"KeepValues": True})
    assert lengths_of(step.schedule) == UNITS | {"1B": 3, "0B": 3}
    assert lengths_of(step.executable.schedule) == UNITS
    again = step_of(force={"KeepValues": False})
    assert again.schedule == step.schedule
    assert lengths_of(again.executable.schedule) == UNITS | {"1B": 3, "0B": 3}


def test_less_than_half_of_a_forward_pass_counts_nothing():
    """With the results of products marked, only activations are repeated."""
    step = step_of(Stages(mark=recomputation_checkpoint))
    assert sum("computes" in line for line in step.program.short().splitlines()) == 2
    assert lengths_of(step.schedule) == UNITS


def test_the_text_of_a_schedule_says_what_is_repeated():
    step = step_of(recompute="stages")
    text = str(step.schedule)
    assert text.count("on ipu1, repeats its forward pass  # ") == 1
    read = Schedule.parse(text)
    assert read == step.schedule
    assert read.timed() == step.schedule.timed()
    read.check(step.program)
