"""Check that programs are values, and that people find their model in the printed form."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import BeginBlock, Options, compile_inference, compile_training
from ipu_dynamo.program import Call, Copy, Repeat, Update


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = BeginBlock(nn.Linear(width, 2), "second", 1)

    def forward(self, x, y):
        h = torch.tanh(self.first(x))
        return F.mse_loss(self.second(h), y)


def program(model=None, **options):
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = compile_training(model, optimizer, Options(engine="eager", **options))
    rows = step.options.gradient_accumulation * step.options.replicas
    step.compile(torch.ones(2 * rows, 3), torch.ones(2 * rows, 2))
    return step.program


def test_two_compilations_are_equal_and_hash_alike():
    first, second = program(), program()
    assert first == second
    assert hash(first) == hash(second)
    assert str(first) == str(second)


@pytest.mark.parametrize(
    "other",
    [
        lambda: program(Net(width=5)),
        lambda: program(gradient_accumulation=2),
        lambda: program(replicas=2),
        lambda: program(loss_scale=2.0),
        lambda: program(output_mode="all"),
    ],
)
def test_programs_that_do_something_else_differ(other):
    assert program() != other()


def test_programs_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        program().body = ()


def test_one_of_two_equal_instructions_is_replaced_by_its_number():
    whole = program()
    number, call = list(whole.numbered_calls().items())[-1]
    twice = whole.with_instructions({number: [call, call]})
    assert twice.numbered_calls() == whole.numbered_calls() | {number + 1: call}
    other = dataclasses.replace(call, function="another")
    changed = twice.with_instructions({number + 1: [other]})
    assert changed.calls == (*twice.calls[:-1], other)
    assert twice.with_instructions({number: []}) == whole
    loops = [i for i in changed.walk() if isinstance(i, Repeat)]
    assert [loop.count for loop in loops] == [
        i.count for i in whole.walk() if isinstance(i, Repeat)
    ]


def test_walk_gives_every_instruction_once_loops_first():
    whole = program(gradient_accumulation=2)
    kinds = [type(i) for i in whole.walk()]
    assert kinds[:2] == [Repeat, Repeat]
    assert kinds.count(Call) == len(whole.calls) == 3
    assert kinds.count(Copy) == len(whole.copies) == 2
    assert kinds.count(Update) == 2


def test_stages_count_once_for_both_directions():
    assert program().num_stages == 2
    assert program().num_ipus == 2


def test_printed_program_has_header_variables_streams_copies_and_updates():
    text = str(program(gradient_accumulation=2, replicas=2, output_mode="all"))
    for part in (
        "program training: 2 stages on 2 IPUs, 2 replicas, 3 functions",
        "parameter %first.weight: f32[4,3]  on ipu0",
        "accumulator %second.bias..grad: f32[2]  on ipu1, one per replica",
        "state %second.bias..momentum_buffer: f32[2]  on ipu1",
        "input %x: f32[2,3]",
        "output %0: f32[]  return all",
        "repeat 1 over device iterations",
        "repeat 2 over micro-batches",
        "receive %x = host.x  -> ipu0",
        "f32[2,4], 32 bytes  ipu0 -> ipu1",
        "f32[2,4], 32 bytes  ipu1 -> ipu0",
        "all_reduce sum over replicas (%first.weight..grad, %first.bias..grad)  on ipu0",
        "update group 0 sgd(momentum) / 4, clear (%first.weight by %first.weight..grad",
        "send host.0 = %mse_loss  <- ipu1",
    ):
        assert part in text


def test_users_line_stands_behind_operators_calls_copies_and_sends():
    lines = str(program()).splitlines()

    def source_of(start):
        return next(line for line in lines if line.strip().startswith(start)).partition("# ")[2]

    here = "test_program.py:"
    assert source_of("%tanh: f32[2,4] = aten.tanh(").startswith(here)
    assert source_of("%tanh: f32[2,4] = aten.tanh(").endswith("h = torch.tanh(self.first(x))")
    assert source_of("copy %tanh").endswith("h = torch.tanh(self.first(x))")
    assert source_of("send host.0").endswith("return F.mse_loss(self.second(h), y)")
    assert source_of("%mse_loss_backward").endswith("return F.mse_loss(self.second(h), y)")


def test_short_form_has_memory_by_ipu_and_no_operators():
    text = program().short()
    assert "ipu0: 196 B in 7 variables (2 parameters, 2 accumulators, 3 states" in text
    assert "aten." not in text
    assert "call @forward0(" in text


def test_plain_function_is_quoted_too():
    def model(x):
        return torch.sin(x)

    run = compile_inference(model, {"engine": "eager"})
    run.compile(torch.ones(2))
    assert "in model: return torch.sin(x)" in str(run.program)
