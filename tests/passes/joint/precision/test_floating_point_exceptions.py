"""Check what raises with floating-point exceptions on, what does not, and what the error names."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import poptorch
from ipu_dynamo import BeginBlock, Options, compile_inference, compile_training, identity_loss
from ipu_dynamo.errors import ExecutionError
from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.testing import assert_same_bits, recipes
from tests.properties.evaluate import captured, check, evaluate, named_inputs

ON = Options(floating_point_exceptions=True)
inf, nan = math.inf, math.nan


class Model(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, *values):
        return self.compute(*values)


RAISING = {
    "infinity less infinity": (torch.sub, (inf, inf), "invalid"),
    "zero by zero": (torch.div, (0.0, 0.0), "division by zero"),
    "itself": (lambda x: x / x, (inf,), "division by infinity"),
    "one by infinity": (lambda x: 1 / x, (inf,), "division by infinity"),
    "two by infinity": (torch.div, (2.0, inf), "division by infinity"),
    "by the number infinity": (lambda x: x / inf, (2.0,), "division by infinity"),
    "remainder of zero": (torch.remainder, (2.0, 0.0), "division by zero"),
    "one by zero": (lambda x: 1 / x, (0.0,), "division by zero"),
    "infinity by zero": (torch.div, (inf, 0.0), "division by zero"),
    "by the number zero": (lambda x: x / 0.0, (2.0,), "division by zero"),
    "zero times infinity": (torch.mul, (0.0, inf), "invalid"),
    "root of a negative number": (torch.sqrt, (-1.0,), "invalid"),
    "logarithm of a negative number": (torch.log, (-1.0,), "invalid"),
    "logarithm of zero": (torch.log, (0.0,), "division by zero"),
    "comparison": (lambda x, y: (x < y).float(), (1.0, nan), "comparison"),
    "overflow": (torch.exp, (1000.0,), "overflow"),
    "overflow of a half": (lambda x: x.half(), (1e6,), "overflow"),
    "overflow of a sum": (torch.sum, (3e38,), "overflow"),
    "softmax of nothing": (lambda x: x.softmax(0), (-inf,), "invalid"),
}
QUIET = {
    "infinity plus one": (lambda x: x + 1, (inf,)),
    "nan plus one": (lambda x: x + 1, (nan,)),
    "remainder of infinity": (torch.remainder, (2.0, inf)),
    "nan by infinity": (torch.div, (nan, inf)),
    "a masked softmax": (lambda x: x.masked_fill(x > 0, -inf)[:1].softmax(0).sum() * 0, (-1.0,)),
    "a chosen infinity": (lambda x: torch.where(x > 0, -inf, x), (1.0,)),
    "asking for nan": (lambda x: x.isnan().float(), (nan,)),
    "a maximum": (lambda x: x.amax(0), (-inf,)),
}


def given_values(numbers):
    return [torch.tensor([number, number]) for number in numbers]


@pytest.mark.parametrize("case", RAISING)
def test_an_exception_names_operator_and_line(case):
    compute, numbers, problem = RAISING[case]
    values = given_values(numbers)
    with pytest.raises(ExecutionError, match=problem) as caught:
        compile_inference(Model(compute), ON)(*values)
    text = str(caught.value)
    assert "= aten." in text
    assert "test_floating_point_exceptions.py:" in text
    compile_inference(Model(compute), Options(engine="eager"))(*values)  # quiet when off


@pytest.mark.parametrize("case", QUIET)
def test_what_operands_account_for_is_no_exception(case):
    compute, numbers = QUIET[case]
    values = given_values(numbers)
    found = compile_inference(Model(compute), ON)(*values)
    torch.testing.assert_close(found, compute(*values), equal_nan=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), BeginBlock(nn.Linear(2, 1), "second", 1)

    def forward(self, x, y):
        return F.mse_loss(self.second(self.first(x)).sqrt(), y)


def test_a_backward_pass_raises_with_its_stage_and_the_next_call_works():
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), ON)
    zero = torch.full((1, 2), -1.0)  # the root of 0 is 0, but its derivative is infinite
    with torch.no_grad():
        model.second.bias.fill_(2.0)
    with pytest.raises(ExecutionError, match=r"division by zero[\s\S]*stage: 1"):
        step(zero, torch.ones(1, 1))
    step(zero + 2, torch.ones(1, 1))


class ChangedSlice(nn.Module):
    """A change of a slice, whose backward pass copies into new memory."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        h[:, :2] += 1.0
        return identity_loss(h, "sum")


def test_memory_that_nothing_was_written_to_is_not_checked():
    model = ChangedSlice()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), ON)
    torch.use_deterministic_algorithms(True)  # it fills such memory with nan
    try:
        step(torch.ones(2, 4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert "aten.new_empty_strided" in str(step.program)


def test_poptorch_raises_its_own_error():
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True)
    model = poptorch.inferenceModel(Model(torch.log), options)
    with pytest.raises(poptorch.Error, match=r"aten.log[\s\S]*test_floating_point_exceptions.py"):
        model(torch.zeros(2))


@given(recipe=recipes(), training=st.booleans())
def test_keeps_the_values_of_a_graph_that_does_not_raise(recipe, training):
    model, batch = recipe.build(), recipe.data(1)
    options = Options(floating_point_exceptions=True)
    name = "FloatingPointExceptions"
    capture, one = captured(model, batch, options, training=training, before=name)
    inputs = named_inputs(model, batch)
    before = evaluate(capture, inputs)
    one(capture)
    check(capture)
    try:
        after = evaluate(capture, inputs)
    except FloatingPointError:
        assert not all(value.isfinite().all() for value in before.values())
        return
    assert_same_bits(after, before)
    text = write_level(capture)
    assert not one(capture)
    assert write_level(capture) == text
