"""Check when backward passes are split, and that a run does as the whole ones do.

That splitting keeps every bit of random graphs and models is checked in `tests/properties`.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import BeginBlock, Options, Strategy, compile_training
from ipu_dynamo.options import OptionError
from ipu_dynamo.program import Accumulate, Program

SPLIT, WHOLE = Strategy("pipelined", schedule="zero_bubble"), Strategy("pipelined")


class Chain(nn.Module):
    def __init__(self, stages=3, wrap=nn.Identity):
        super().__init__()
        self.layers = nn.ModuleList(wrap(nn.Linear(8, 8)) for _ in range(stages))
        for ipu, layer in enumerate(self.layers):
            BeginBlock(layer, ipu_id=ipu)

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.mse_loss(h, x)


class Scaled(nn.Module):
    """A layer whose weight gradient needs a buffer that the layer changes."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.register_buffer("scale", torch.ones(8, 8))

    def forward(self, x):
        h = F.linear(x, self.layer.weight * self.scale.clone(), self.layer.bias)
        self.scale.add_(0.1)
        return h


def trained(strategy, engine="eager", wrap=nn.Sequential, **options):
    torch.manual_seed(0)
    model = Chain(wrap=wrap)
    chosen = {"gradient_accumulation": 7, "output_mode": "all"} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = compile_training(model, optimizer, Options(engine=engine, strategy=strategy, **chosen))
    rows = 2 * chosen["gradient_accumulation"] * chosen.get("replicas", 1)
    losses = [step(torch.randn(rows, 8)) for _ in range(3)]
    return step, [*losses, *(value.clone() for value in model.state_dict().values())]


def test_all_stages_but_the_first_are_split():
    step, _ = trained(SPLIT)
    assert [(c.direction, c.stage) for c in step.program.calls] == [
        ("forward", 0),
        ("forward", 1),
        ("forward_backward", 2),
        ("weights", 2),
        ("backward", 1),
        ("weights", 1),
        ("backward", 0),  # nothing waits for it
    ]
    functions = {f.name: [str(n.target) for n in f.operators] for f in step.program.functions}
    assert "weights1" not in functions  # equal functions are one
    writes = [i for i in step.program.walk() if isinstance(i, Accumulate)]
    assert [(w.direction, w.stage) for w in writes] == [
        ("weights", 2),
        ("weights", 1),
        ("backward", 0),
    ]


@pytest.mark.few(4)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"replicas": 2}, {"mean_strategy": "running"}],
    ids=["plain", "replicas", "running"],
)
def test_weights_are_the_same_bits(workers, options):
    _, expected = trained(WHOLE, workers=1, **options)
    _, found = trained(SPLIT, workers=workers, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_agrees():
    _, expected = trained(WHOLE, "inductor", workers=2)
    _, found = trained(SPLIT, "inductor", workers=2)
    assert all(torch.allclose(a, b, 1e-5, 1e-6) for a, b in zip(found, expected, strict=True))


def test_a_stage_whose_weight_gradient_needs_a_changing_buffer_agrees():
    _, found = trained(SPLIT, wrap=Scaled, workers=3)
    _, expected = trained(WHOLE, wrap=Scaled, workers=1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_stash_is_deeper_than_the_first_stage_s():
    """The last stage keeps what its last three gradients of weights need until the others end."""
    split, _ = trained(SPLIT)
    whole, _ = trained(WHOLE)
    assert [s.copies for s in whole.program.stash] == [5, 3, 1]
    assert [s.copies for s in split.program.stash] == [5, 3, 3]
    assert list(split.schedule.stash().values()) == [5, 3, 3]


def test_the_printed_stash_has_what_gradients_of_weights_wait_with():
    """The input of a matmul waits since the forward pass, its gradient since the backward pass."""
    split, _ = trained(SPLIT, recompute="off")
    assert [str(one) for one in split.program.stash] == [
        "stage 0 on ipu0 keeps 5 micro-batches of %tanh: f32[2,8], %x: f32[2,8]; 640 B in all",
        "stage 1 on ipu1 keeps 3 micro-batches of %tanh_1: f32[2,8], %tanh..on1: f32[2,8], "
        "and 2 of %tanh_backward_1..stage1: f32[2,8]; 512 B in all",
        "stage 2 on ipu2 keeps 3 micro-batches of %tanh_backward..stage2: f32[2,8], "
        "%tanh_1..on2: f32[2,8]; 384 B in all",
    ]


def test_the_program_can_be_read_back():
    program = trained(SPLIT)[0].program
    again = Program.parse(program.text())
    assert again == program
    assert again.order == "pipelined"
    assert again.stash == program.stash


def test_workers_wait_less():
    split, _ = trained(SPLIT)
    whole, _ = trained(WHOLE)
    assert split.schedule.timed().cycles < whole.schedule.timed().cycles
    assert split.schedule.idle < whole.schedule.idle


def test_other_strategies_have_no_such_schedule():
    with pytest.raises(OptionError, match="schedule zero_bubble is for the strategy pipelined"):
        Strategy("sharded", schedule="zero_bubble")
    with pytest.raises(OptionError, match="schedule is 'fast'; choose one of grouped, zero_bubble"):
        Strategy("pipelined", schedule="fast")
