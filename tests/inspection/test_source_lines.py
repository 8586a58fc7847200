"""Check that each operator has a line of the user's, or the module that calls it."""

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import ExecutionError, compile_inference
from ipu_dynamo.options import Options
from ipu_dynamo.program import Program
from tests.inspection.looking import EAGER

X = torch.ones(4, 8)


def layers():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = layers()

    def forward(self, x):
        return self.inner(x) * 2


def sources(program):
    """The source of each operator in the listing of a program."""
    lines = (line for line in str(program).splitlines() if line.startswith("  %"))
    return [line.partition("  # ")[2] for line in lines]


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_layers_through_torch_compile(engine):
    torch._dynamo.reset()
    model = torch.compile(layers(), backend="ipu", options={"engine": engine})
    model(X).sum().backward()
    forward, backward = ipu_dynamo.programs()
    assert set(sources(forward)) == {"0: Linear", "1: ReLU", "2: Linear"}
    assert set(sources(backward)) == {"0: Linear", "1: ReLU", "2: Linear"}
    texts = [program.text() for program in (forward, backward)]
    assert not any("unknown source" in text or "no line of" in text for text in texts)
    with pytest.raises(ExecutionError, match="from:  0: Linear"):
        model(torch.ones(4, 8, dtype=torch.int64))


def test_layers_of_whole_steps():
    step = compile_inference(layers(), Options(**EAGER))
    step(X)
    assert set(sources(step.program)) == {"0: Linear", "1: ReLU", "2: Linear"}
    alone = compile_inference(nn.Linear(8, 2), Options(**EAGER))
    alone(X)
    assert set(sources(alone.program)) == {"Linear"}
    assert str(Program.parse(step.program.text())) == str(step.program)
    assert str(Program.parse(alone.program.text())) == str(alone.program)


def test_a_line_of_the_user_comes_first():
    inference = compile_inference(Outer(), Options(**EAGER))
    inference(X)
    assert all(source.startswith("test_source_lines.py:") for source in sources(inference.program))
