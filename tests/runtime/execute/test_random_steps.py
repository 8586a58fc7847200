"""Check that random numbers belong to a step, however steps are grouped into calls."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import BeginBlock, ExecutionError, Options, compile_inference, compile_training
from ipu_dynamo.testing import assert_same_bits

ROWS = 4
GOOD = torch.tensor([0, 1, 2, 3])
BAD = torch.tensor([0, 1, 2, 9])  # the table has five rows


class Lookup(nn.Module):
    """Draws a mask for every micro-batch, and fails on a row that the table has not got."""

    def __init__(self, dtype=torch.float32, ipus=(0, 0)):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(5, 16, dtype=dtype), nn.Linear(16, 16, dtype=dtype)
        for module, ipu in zip((self.table, self.layer), ipus, strict=True):
            BeginBlock(module, ipu_id=ipu)

    def forward(self, rows):
        h = self.layer(F.dropout(self.table(rows), 0.5))
        return F.mse_loss(h.float(), torch.ones_like(h).float())


def training(iterations, accumulation=1, dtype=torch.float32, ipus=(0, 0), **options):
    model = Lookup(dtype, ipus)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = compile_training(
        model,
        optimizer,
        Options(
            "eager",
            seed=3,
            device_iterations=iterations,
            gradient_accumulation=accumulation,
            **options,
        ),
    )
    return step, model


def forced(fused):
    """Options by which a step is fused, if it is to be."""
    return {"force": {"FuseStep": True}} if fused else {}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation": 2, "replicas": 2}, {"dtype": torch.half, "stochastic_rounding": True}],
    ids=["plain", "micro-batches", "stochastic rounding"],
)
def test_steps_of_one_call_draw_what_calls_of_one_step_draw(options, fused):
    options = options | forced(fused and not options)
    rows = options.get("accumulation", 1) * options.get("replicas", 1) * ROWS
    batches = torch.arange(4 * rows) % 5
    (together, one), (single, other) = training(4, **options), training(1, **options)
    together(batches)
    for batch in batches.split(rows):
        single(batch)
    assert together.executable.step == single.executable.step == 4
    assert_same_bits(one.state_dict(), other.state_dict())


def test_iterations_of_an_inference_draw_what_calls_draw():
    def outputs(iterations):
        options = Options("eager", seed=3, device_iterations=iterations)
        run = compile_inference(nn.Dropout(0.5), options)
        return torch.cat([run(rows) for rows in torch.ones(8, 64).split(iterations)])

    assert_same_bits(outputs(4), outputs(1))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ipus", [(0, 0), (0, 1)])
def test_a_failed_call_does_not_repeat_the_masks_of_its_complete_steps(fused, ipus):
    options = {"ipus": ipus} | forced(fused and ipus == (0, 0))
    (step, model), (reference, expected) = training(3, **options), training(1, **options)
    step.compile(GOOD.repeat(3))
    with pytest.raises(ExecutionError):
        step(torch.cat([GOOD, GOOD + 1, BAD]))
    assert step.executable.step == 2
    step(GOOD.repeat(3))
    for batch in (GOOD, GOOD + 1, GOOD, GOOD, GOOD):
        reference(batch)
    assert_same_bits(model.state_dict(), expected.state_dict())


def test_a_failed_inference_counts_no_step():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 16)

        def forward(self, rows):
            return F.dropout(self.table(rows), 0.5, training=True)

    model = Fails().eval()
    run, other = (
        compile_inference(model, Options("eager", seed=3, device_iterations=2)) for _ in range(2)
    )
    with pytest.raises(ExecutionError):
        run(torch.cat([GOOD, BAD]))
    assert_same_bits(run(GOOD.repeat(2)), other(GOOD.repeat(2)))
