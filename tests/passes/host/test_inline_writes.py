"""Check that functions of programs are pure, and that joined with their writes they do the same."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import (
    AutomaticLossScaling,
    BeginBlock,
    Options,
    Strategy,
    compile_inference,
    compile_training,
    identity_loss,
)
from ipu_dynamo.capture.trace import read_arguments
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.passes.host.recipes.prepack_weights import constant_variables
from ipu_dynamo.passes.pipeline import run_host_passes
from ipu_dynamo.program import Accumulate, HostProgram, Program, WriteBuffer
from ipu_dynamo.program.ir.verify.program import verify
from ipu_dynamo.program.schedule.dependencies import changed_variables, dependencies
from ipu_dynamo.program.schedule.planning import independent
from ipu_dynamo.runtime.engines.engines import EagerEngine
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.testing import (
    assert_close,
    assert_same_bits,
    assert_same_inference,
    assert_same_training,
    options_for,
    recipes,
)
from ipu_dynamo.whole_step.compile_model import compile_model
from ipu_dynamo.whole_step.optimizer.torch_optimizers import describe
from tests.properties.running import calls, draw_placement, slow

aten = torch.ops.aten
EAGER = Options("eager")


def inlined(step):
    return step.executable.host_program.inlined


def targets(program):
    return [node.target for function in program.functions for node in function.operators]


def of_kind(program, kind):
    return [i for i in program.walk() if isinstance(i, kind)]


@pytest.mark.examples(40)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_drawn_programs_are_pure_and_what_runs_writes_the_same(recipe, training, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement, training=training))
    model = placement.place(recipe.build())
    step = (
        compile_training(model, slow(model), options)
        if training
        else compile_inference(model, options)
    )
    step.compile(*calls(recipe, options, training=training, count=1)[0])
    program, runs = step.program, inlined(step)
    note(f"{program}\n{runs}")
    verify(program)
    for function in program.functions:
        assert not function.written
        assert not any(map(writes, function.operators))
    assert not of_kind(runs, Accumulate | WriteBuffer)
    assert changed_variables(runs) == changed_variables(program)
    assert dependencies(runs) == dependencies(program)
    assert program.stash == runs.stash


@pytest.mark.examples(15)
@given(recipe=recipes(random=True), data=st.data())
def test_the_text_of_a_program_depends_on_no_engine_and_no_worker(recipe, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement))
    texts = set()
    for engine, workers in (("eager", 1), ("inductor", 4)):
        model = placement.place(recipe.build())
        groups = describe(slow(model), dict(model.named_parameters()))
        chosen = replace(options, engine=engine, workers=workers)
        example = read_arguments(model, recipe.data(1), {})
        program = compile_model(model, example, chosen, groups, training=True).program
        verify(program)
        assert not any(function.written for function in program.functions)
        texts.add(program.text())
    assert len(texts) == 1


def test_a_program_without_writes_stays_as_it_is():
    run = compile_inference(nn.Linear(2, 2), EAGER)
    run.compile(torch.ones(1, 2))
    assert inlined(run) is run.program


# --- Buffers -----------------------------------------------------------------------------------


class Stack(nn.Module):
    """Equal blocks that write buffers, and a loss right behind them or after one more layer."""

    def __init__(self, *, last):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(6)]
        self.blocks = nn.Sequential(*blocks, *([nn.Linear(6, 6)] if last else []))

    def forward(self, x, y=None):
        out = self.blocks(x)
        return out if y is None else F.mse_loss(out, y)


def batches(count, rows=5, width=6):
    rng = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, width, generator=rng), torch.randn(rows, width, generator=rng))
        for _ in range(count)
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_blocks_with_buffers_are_outlined_and_train_as_plain_pytorch(last, cut):
    model = Stack(last=last).double()
    if cut:
        BeginBlock(model.blocks[3], ipu_id=1)
    options = Options("eager", outline=True)
    given_batches = [tuple(t.double() for t in batch) for batch in batches(3)]
    step = assert_same_training(model, given_batches, options, rtol=1e-9, atol=1e-9)
    assert len(step.program.functions) < len(step.program.calls)
    written = [name for write in of_kind(step.program, WriteBuffer) for name in write.variables]
    assert len(written) == len(set(written)) == 18


def test_a_call_of_its_own_writes_the_buffers_of_a_block_that_is_shared():
    model = Stack(last=False).train()
    run = compile_inference(model, Options("eager", outline=True))
    x = batches(1)[0][0]
    run.compile(x)
    (write,) = of_kind(run.program, WriteBuffer)
    before, after = run.program.calls, inlined(run).calls
    assert len(after) == len(before) + 1
    *blocks, last = after
    assert [call.results for call in blocks] == [call.results for call in before]
    assert last.results == ()
    assert set(last.arguments) == {*write.variables, *write.values}
    function = next(f for f in inlined(run).functions if f.name == last.function)
    assert [node.target for node in function.operators] == [aten.copy_.default] * 18


@pytest.mark.parametrize("workers", [1, 2])
def test_statistics_that_inference_updates_pass_from_one_micro_batch_to_the_next(workers):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).train()
    options = Options("eager", device_iterations=4, workers=workers)
    run = assert_same_inference(model, [torch.randn(12, 6) for _ in range(3)], options)
    assert not independent(run.program)
    assert not independent(inlined(run))
    assert {"0.weight", "0.bias", "1.weight", "1.bias"} == constant_variables(inlined(run))


def test_buffers_that_are_exchanged_get_the_values_from_before():
    class Exchange(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.tensor([1.0, 2.0]))
            self.register_buffer("b", torch.tensor([3.0, 4.0]))

        def forward(self, x):
            old = self.a.clone()
            self.a.copy_(self.b)
            self.b.copy_(old)
            return x + self.a

    options = Options("eager", device_iterations=3)
    assert_same_inference(Exchange(), [torch.zeros(3, 2)] * 2, options)


def test_a_buffer_takes_an_input_or_another_variable():
    class Keep(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 2))
            self.register_buffer("last", torch.zeros(1, 2))
            self.register_buffer("held", torch.zeros(1, 2))

        def forward(self, x):
            before = self.last + self.held
            self.last.copy_(x)
            self.held.copy_(self.weight)
            return before

    assert_same_inference(Keep(), [torch.full((1, 2), float(i)) for i in range(3)], EAGER)


# --- Gradients ---------------------------------------------------------------------------------


class Tied(nn.Module):
    """A table that is also the last layer; the head may be on another IPU."""

    def __init__(self, *, cut):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(1024, 128), nn.Linear(128, 128)
        self.cut = cut
        if cut:
            BeginBlock(self.layer, ipu_id=1)

    def forward(self, rows, wanted):
        h = self.layer(self.table(rows)).tanh()
        return F.cross_entropy(F.linear(h, self.table.weight), wanted)


def tokens(count):
    rows = torch.randint(1024, (count * 4,), generator=torch.Generator().manual_seed(0))
    return rows, rows.roll(1)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("cut", [False, True])
def test_the_terms_of_a_tied_table_are_written_one_by_one(cut, count):
    model = Tied(cut=cut).double()
    options = Options("eager", gradient_accumulation=count, strategy=Strategy("sharded"))
    step = assert_same_training(model, [tokens(count)] * 2, options, rtol=1e-9, atol=1e-9)
    of_table = [
        (write.rule, write.ipu)
        for write in of_kind(step.program, Accumulate)
        for name in write.accumulators
        if name == "table.weight..grad"
    ]
    alone = cut and count == 1  # rows alone are not worth it where they are not added
    expected = ["store", "+="] if count == 1 else ["+=", "+="]
    assert [rule for rule, _ in of_table] == expected[: 1 if alone else 2]
    assert len({ipu for _, ipu in of_table}) == 1
    assert (torch.ops.ipu.accumulate_rows.default in targets(inlined(step))) is not alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_running_mean_names_the_share_that_it_moves_by(dtype):
    model = nn.Linear(2, 1).to(dtype)
    model.forward = lambda x, y, f=model.forward: F.mse_loss(f(x), y)
    options = Options("eager", gradient_accumulation=4, mean_strategy="running")
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=1.0), options)
    x, y = torch.ones(4, 2, dtype=dtype), torch.arange(4.0).reshape(4, 1).to(dtype)
    step.compile(x, y)
    (mean,) = of_kind(step.program, Accumulate)
    assert (mean.rule, mean.weight) == ("mean", ".accumulation_weight")
    assert str(mean).startswith("accumulate (%weight..grad, %bias..grad) mean (")
    assert ") by %.accumulation_weight  on ipu0" in str(mean)
    found = targets(inlined(step))
    assert found.count(aten.lerp_.Tensor) == 2
    assert found.count(aten.type_as.default) == (2 if dtype == torch.float16 else 0)


@pytest.mark.parametrize("count", [1, 2])
def test_counts_of_large_gradients_are_added_and_gradients_of_one_micro_batch_stored(count):
    class Net(nn.Linear):
        def forward(self, x, y):
            return F.mse_loss(super().forward(x), y)

    model = Net(3, 2).half()
    scaling = AutomaticLossScaling()
    options = Options("eager", gradient_accumulation=count, automatic_loss_scaling=scaling)
    step = compile_training(model, slow(model), options)
    step(torch.randn(4, 3).half(), torch.randn(4, 2).half())
    assert step.loss_scale == 2 * step.last_loss_scale  # no gradient was large
    verify(step.program)
    writes_of = of_kind(step.program, Accumulate)
    rules = {name: write.rule for write in writes_of for name in write.accumulators}
    of_gradients = "store" if count == 1 else "+="
    assert rules.pop(".loss_scale.within0") == "+="
    assert set(rules.values()) == {of_gradients}


def test_weight_gradients_of_convolutions_are_split_off_and_keep_every_bit():
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))
            for ipu, layer in enumerate(self.layers):
                BeginBlock(layer, ipu_id=ipu)

        def forward(self, x):
            h = x
            for layer in self.layers:
                h = torch.tanh(layer(h))
            return F.mse_loss(h, x)

    def train(schedule, workers):
        model = Images()
        strategy = Strategy("pipelined", schedule=schedule)
        options = Options("eager", gradient_accumulation=7, strategy=strategy, workers=workers)
        step = compile_training(model, slow(model), options)
        losses = [step(x) for x in torch.randn(2, 14, 2, 5, 5, generator=torch.Generator())]
        return step, (losses, dict(model.state_dict()))

    split, found = train("zero_bubble", 3)
    _, expected = train("grouped", 1)
    assert_same_bits(found, expected)
    late = {write.direction for write in of_kind(split.program, Accumulate)}
    assert late == {"weights", "backward"}  # of the first stage, for which nobody waits


# --- Through text ------------------------------------------------------------------------------


@cache
def channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))
    model = model.to(memory_format=torch.channels_last)
    model.forward = lambda x, y, f=model.forward: F.cross_entropy(f(x), y)
    options = Options("eager", gradient_accumulation=2)
    step = compile_training(model, slow(model), options)
    step.compile(torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 1, 0]))
    return step


def test_what_is_read_from_text_is_joined_to_the_same_functions():
    """Also where weights are no dense tensors: accumulators have their layout."""
    step = channels_last()
    assert any(variable.strides for variable in step.program.variables)
    again = run_host_passes(Program.parse(step.program.text())).inlined
    assert [f.key for f in again.functions] == [f.key for f in inlined(step).functions]
    assert again.body == inlined(step).body


def test_instructions_cannot_run_before_they_are_joined():
    program = channels_last().program
    tensors = {v.name: torch.zeros(v.type.shape, dtype=v.type.dtype) for v in program.variables}
    with pytest.raises(ValueError, match="run what InlineWrites makes"):
        Executable(HostProgram(program, program), tensors, EagerEngine())


def test_gradients_of_one_value_for_two_parameters_are_both_written():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return identity_loss((self.a + self.b) * x, "sum")

    x = torch.tensor([[1.0, 2.0, 3.0]])
    model = Two()
    step = assert_same_training(model, [(x,)] * 2, EAGER)
    assert_close(model.a.detach(), model.b.detach())
    (write,) = of_kind(step.program, Accumulate)
    assert len(write.accumulators) == 2
