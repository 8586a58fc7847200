"""Check that a program runs as its text says: loops as often as they count, sums as sums."""

import re

import pytest
import torch
from torch import nn

from ipu_dynamo import (
    BeginBlock,
    InputError,
    Options,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.passes.pipeline import run_host_passes
from ipu_dynamo.program import Program
from ipu_dynamo.runtime.engines.engines import EagerEngine
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.testing import assert_same_bits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        BeginBlock(self.last, ipu_id=1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.last(self.first(x).tanh()), y)


def data(rows):
    rng = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=rng), torch.randn(rows, 2, generator=rng)


def training(iterations, accumulation, **options):
    """A compiled step for micro-batches of two rows."""
    model = Net()
    step = compile_training(
        model,
        torch.optim.Adam(model.parameters()),
        Options(
            "eager",
            device_iterations=iterations,
            gradient_accumulation=accumulation,
            reduction="sum",
            **options,
        ),
    )
    step.compile(*data(2 * iterations * accumulation))
    return step


def edited(program, over, count):
    """The program that is read from its text with another number in a loop."""
    text, changes = re.subn(
        rf'(Repeat\(over="{over}", count=)\d+', rf"\g<1>{count}", program.text()
    )
    assert changes == 1
    return Program.parse(text)


def run(program, step, *args):
    """One call of a program from the weights of `Net`; what it returns, and all variables."""
    tensors = {v.name: step.executable.tensor(v.name).clone() for v in program.variables}
    executable = Executable(run_host_passes(program), tensors, EagerEngine())
    given = dict(zip((stream.name for stream in program.inputs), args, strict=True))
    outputs = executable(given, [group.values for group in step.groups])
    return outputs, {v.name: executable.tensor(v.name) for v in program.variables}


@pytest.mark.parametrize("strategy", [Strategy(), Strategy("pipelined")], ids=["plain", "pipeline"])
@pytest.mark.parametrize(
    ("over", "wanted"), [("micro_batch", (2, 6)), ("device_iteration", (3, 4))]
)
def test_an_edited_loop_of_a_training_program_runs_as_often_as_it_counts(over, wanted, strategy):
    step = training(2, 4, strategy=strategy)
    expected = training(*wanted, strategy=strategy)
    count = wanted[over == "micro_batch"]
    args = data(2 * wanted[0] * wanted[1])
    found = run(edited(step.program, over, count), step, *args)
    assert_same_bits(found, run(expected.program, expected, *args))
    with pytest.raises(InputError, match="Shape mismatch"):
        run(edited(step.program, over, count), step, *data(16))


def test_an_edited_loop_of_an_inference_runs_as_often_as_it_counts():
    model = nn.Linear(4, 3)
    three, five = (compile_inference(model, Options("eager", device_iterations=n)) for n in (3, 5))
    rows = torch.randn(5, 4)
    three.compile(rows[:3])
    ((found,), _) = [
        tuple(part.values()) for part in run(edited(three.program, "micro_batch", 5), three, rows)
    ]
    assert_same_bits(found, five(rows))


def test_as_many_replicas_must_have_input_groups_as_run():
    step = training(1, 1, replicas=2)
    program, engine = step.program, EagerEngine()
    tensors = {v.name: torch.zeros(v.type.shape) for v in program.variables}
    with pytest.raises(ValueError, match="3 replicas have input groups, 2 run"):
        Executable(run_host_passes(program), tensors, engine, (0, 0, 1))


def test_a_mean_over_replicas_is_no_instruction():
    """One that was read as `average` was executed as a sum."""
    step = training(1, 1, replicas=2)
    line = next(line for line in step.program.text().splitlines() if "AllReduce" in line)
    assert "all_reduce sum over replicas (" in str(step.program)
    text = step.program.text().replace(line, line[:-1] + ", average=True)")
    with pytest.raises(ValueError, match="AllReduce has no field average"):
        Program.parse(text)
