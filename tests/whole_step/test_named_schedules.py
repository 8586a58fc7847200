"""Check that schedules by name compute what stages one after the other do, and their refusals."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import (
    Block,
    CompileError,
    Options,
    StageSpec,
    Strategy,
    compile_inference,
    compile_training,
    load,
    save,
)
from ipu_dynamo.errors import ProgramError
from ipu_dynamo.options import OptionError
from ipu_dynamo.options.schedule_order import write_order
from ipu_dynamo.program import Call, Program, Repeat
from ipu_dynamo.program.ir.verify.shape import check_loops
from ipu_dynamo.program.schedule.pipeline_orders import order_of
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.tune.intra_op import intra_op_threads

NAMES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")


class Chain(nn.Module):
    """A layer for each stage, some with a skip from the first, some with dropout."""

    def __init__(self, ipus):
        super().__init__()
        self.ipus = ipus
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in ipus
        )

    def forward(self, x):
        h = x
        for stage, (ipu, layer) in enumerate(zip(self.ipus, self.layers, strict=True)):
            with Block(f"stage{stage}", ipu_id=ipu):
                h = torch.tanh(layer(h)) + (x if stage % 3 == 2 else 0)
                if stage % 2:
                    h = nn.functional.dropout(h, 0.2)
                if stage == len(self.ipus) - 1:
                    return nn.functional.mse_loss(h, x)
        raise AssertionError


def trained(ipus, strategy, count=4, replicas=1, **options):
    """The step, and all that two calls of it leave."""
    torch.manual_seed(0)
    model = Chain(ipus)
    chosen = Options(
        engine="eager",
        strategy=strategy,
        gradient_accumulation=count,
        replicas=replicas,
        output_mode="all",
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = compile_training(model, optimizer, chosen)
    losses = [step(torch.randn(2 * count * replicas, 8)) for _ in range(2)]
    return step, [*losses, *(value.clone() for value in model.state_dict().values())]


def named(name):
    return Strategy("pipelined", schedule=name)


def placed(name, size, rounds=2):
    """The IPUs of stages for a schedule by name."""
    if name == "zb_v":
        return [*range(size), *reversed(range(size))]
    return [*range(size)] * (rounds if name == "interleaved" else 1)


@st.composite
def cases(draw, *, least=1, most=6):
    """A name, the IPUs of stages, and a number of micro-batches."""
    name = draw(st.sampled_from(NAMES))
    size = draw(st.integers(least, most))
    if name == "zb_v":
        size = min(size, 4)
        return name, placed(name, size), draw(st.integers(2 * size, 3 * size))
    if name == "interleaved":
        rounds = draw(st.integers(1, 3 if size < 3 else 2))
        return name, placed(name, size, rounds), draw(st.integers(1, 2)) * size
    count = draw(st.integers(1 if name == "gpipe" else size, 2 * size))
    return name, placed(name, size), count


@settings(max_examples=300)
@pytest.mark.quick(8)
@given(
    case=cases(),
    replicas=st.integers(1, 2),
    recompute=st.sampled_from(["auto", "off", "stages", "all"]),
    workers=st.sampled_from([None, 1, 2, 3]),
)
def test_bits_are_those_of_the_sharded_strategy(case, replicas, recompute, workers):
    name, ipus, count = case
    more = {"recompute": recompute, "workers": workers, "replicas": replicas}
    with intra_op_threads(1):  # else a pipeline's workers have fewer threads than a sharded step
        step, left = trained(ipus, named(name), count, **more)
        _, expected = trained(ipus, Strategy("sharded"), count, **more)
    for one, other in zip(left, expected, strict=True):
        assert torch.equal(one, other)
    program = step.program
    note(program.short())
    assert program.schedule == (name if len(ipus) > 1 and len({*ipus}) > 1 else "")
    text = program.text()
    assert Program.parse(text).text() == text
    schedule = step.schedule
    schedule.check(program)
    assert Schedule.parse(str(schedule)) == schedule
    for stash in program.stash:
        kept = schedule.stash()[stash.stage]
        assert step.executable.schedule.stash()[stash.stage] <= stash.copies == kept
        stated = {"gpipe": count, "interleaved": count, "zb_h1": len(ipus)}
        assert kept <= stated.get(name, len(ipus) - stash.stage)


@pytest.mark.parametrize("name", NAMES)
def test_programs_load_from_a_file(name, tmp_path):
    step, _ = trained(placed(name, 2), named(name))
    save(step, tmp_path / "step.ipu")
    assert load(tmp_path / "step.ipu").program.text() == step.program.text()
    assert f"repeat 4 over micro-batches, pipelined, {name}\n" in step.program.short()


@pytest.mark.parametrize(
    ("name", "ipus", "count", "problem", "hint"),
    [
        ("1f1b", [0, 1, 0, 1], 4, "needs a stage on each IPU; the stages are on IPUs 0, 1, 0, 1",
         "place the stages on IPUs 0, 1, 2, 3, or use schedule grouped"),
        ("gpipe", [1, 0], 4, "gpipe needs a stage on each IPU; the stages are on IPUs 1, 0",
         "place the stages on IPUs 0, 1,"),
        ("interleaved", [0, 1, 1, 0], 4, "needs 2 IPUs with as many stages each, in rounds",
         "place the stages on IPUs 0, 1, 0, 1,"),
        ("interleaved", [0, 1, 0, 1], 5, "needs a multiple of 2 micro-batches, got 5",
         "set gradient_accumulation to 4 or 6"),
        ("interleaved", [0, 1, 2, 0, 1, 2], 2, "needs a multiple of 3 micro-batches, got 2",
         "set gradient_accumulation to 3"),
        ("1f1b", [0, 1, 2], 2, "1f1b needs at least 3 micro-batches, got 2",
         "set gradient_accumulation to 3 or more, or use schedule gpipe"),
        ("zb_h1", [0, 1, 2], 1, "zb_h1 needs at least 3 micro-batches, got 1",
         "set gradient_accumulation to 3 or more"),
        ("zb_v", [0, 1, 0, 1], 4,
         "zb_v needs two stages on each IPU, there and back; the stages are on IPUs 0, 1, 0, 1",
         "place the stages on IPUs 0, 1, 1, 0, or use schedule grouped"),
        ("zb_v", [0, 1, 2, 3], 8, "zb_v needs two stages", "on IPUs 0, 1, 1, 0, or use"),
        ("zb_v", [0, 1, 2, 1, 0], 8, "zb_v needs two stages", "on IPUs 0, 1, 2, 2, 1, 0, or use"),
        ("zb_v", [0, 0, 1, 1, 0, 0], 4, "on IPUs 0, 0, 1, 1, 0, 0",
         "on IPUs 0, 1, 1, 0, or use schedule grouped; StageSpec joins the blocks of a stage"),
        ("zb_v", [0, 1, 1, 0], 3, "zb_v needs at least 4 micro-batches, got 3",
         "set gradient_accumulation to 4 or more"),
    ],
)  # fmt: skip
def test_refuses_other_placements_and_fewer_micro_batches(name, ipus, count, problem, hint):
    with pytest.raises(CompileError, match=problem) as error:
        trained(ipus, named(name), count)
    assert hint in str(error.value)


def order_text(name, ipus, count):
    """The order of a name, written down."""
    return write_order(order_of(name, ipus, count))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_an_order_of_ones_own_does_what_the_name_does(name):
    ipus = [0, 1, 2] * (1 + (name == "interleaved"))
    text = order_text(name, ipus, 6)
    step, left = trained(ipus, named(text), 6)
    by_name, expected = trained(ipus, named(name), 6)
    for one, other in zip(left, expected, strict=True):
        assert torch.equal(one, other)
    assert step.program.stash == by_name.program.stash
    assert step.schedule == by_name.schedule
    assert step.program.schedule == text
    written = step.program.text()
    assert Program.parse(written).text() == written
    assert "over micro-batches, pipelined, an order of its own" in step.program.short()
    alone = Schedule.parse(text)
    times = [[(r.cycle, r.length) for r in of] for of in alone.timed().runs]
    plain, _ = trained(ipus, named(name), 6, recompute="off")
    assert times == [[(r.cycle, r.length) for r in of] for of in plain.schedule.timed().runs]
    assert alone.stash() == plain.schedule.stash()


def test_a_stage_of_a_v_may_have_several_blocks():
    ipus = [0, 0, 1, 1, 0]
    blocks = ("stage0", "stage1"), ("stage2",), ("stage3",), ("stage4",)
    stages = tuple(map(StageSpec, blocks, placed("zb_v", 2)))
    step, left = trained(ipus, Strategy("pipelined", schedule="zb_v", stages=stages))
    _, expected = trained(ipus, Strategy("sharded"))
    for one, other in zip(left, expected, strict=True):
        assert torch.equal(one, other)
    assert [s.ipu for s in step.program.stash] == placed("zb_v", 2)


def test_stages_of_one_ipu_stay_apart_in_an_order():
    """A V of four stages on two IPUs, with weight gradients of two of them apart."""
    text = """
        worker 0: 0F0 0F1 3F0 3B0 0F2 3F1 3B1 3F2 3B2 0B0 0B1 0B2
        worker 1: 1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 | 1B1 2W0 1W0 2B2 1B2 2W1 1W1 - 2W2 1W2
    """
    step, left = trained([0, 1, 1, 0], named(text), 3, workers=2)
    _, expected = trained([0, 1, 1, 0], Strategy("sharded"), 3)
    for one, other in zip(left, expected, strict=True):
        assert torch.equal(one, other)
    assert [s.stage for s in step.program.stash] == [0, 1, 2, 3]
    step.schedule.check(step.program)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("worker 0: 0F0 0B0\nworker 1: 1F0", "lacks the backward pass of stage 1 on micro-batch 0"),
        ("worker 0: 0F0 0F0 0B0 0B0", "has the forward pass of stage 0 on micro-batch 0 twice"),
        ("worker 0: 0F1 0F0 0B0 0B1", "forward pass of stage 0 on micro-batch 1 before"),
        ("worker 0: 0B0 0F0", "IPU 0 waits with the backward pass of stage 0 on micro-batch 0 for "
         "the forward pass of stage 0 on micro-batch 0"),
        ("worker 0: 0F0 0B0 0F1 0B1\nworker 1: 1F0 1F1 1B0 1B1",
         "IPU 0 waits with the backward pass of stage 0 on micro-batch 0"),
        ("worker 0: 0FB0\nworker 1: 0FB1", "stage 0 is on IPU 0 and on IPU 1"),
        ("worker 0: 0FB0 0W1", "weight gradients of stage 0 on micro-batch 1 before"),
        ("worker 0: 0FB0 0X0", "line 1 of the schedule: expected passes as 0F1.* not '0X0'"),
        ("worker 1: 0FB0", "line 1 of the schedule: expected 'worker 0"),
        ("worker 0: |", "the schedule has no passes"),
    ],
)  # fmt: skip
def test_refuses_an_order_that_cannot_run(text, problem):
    for take in (named, Schedule.parse):
        with pytest.raises(ValueError, match=problem):
            take(text)


def test_refuses_an_order_of_another_model():
    text = order_text("1f1b", [0, 1], 4)
    with pytest.raises(
        CompileError, match="the schedule is of 4 micro-batches, and gradient_accumulation is 5"
    ):
        trained([0, 1], named(text), 5)
    with pytest.raises(CompileError, match="stages on IPUs 0, 1, and the model on 0, 1, 2"):
        trained([0, 1, 2], named(text), 4)


def test_refuses_an_automatic_cut_into_several_stages_of_an_ipu():
    for name, example in (("interleaved", "0, 1, 0, 1"), ("zb_v", "0, 1, 1, 0")):
        problem = f"{name} needs several stages on each IPU.*blocks on IPUs {example}"
        with pytest.raises(OptionError, match=problem):
            Strategy("pipelined", ipus=2, schedule=name)
    with pytest.raises(OptionError, match="schedule 1f1b is for the strategy pipelined"):
        Strategy("sharded", schedule="1f1b")


def test_a_cut_without_blocks_follows_a_name():
    class Layers(nn.Sequential):
        def forward(self, x):
            return nn.functional.mse_loss(super().forward(x), x)

    model = Layers(*(nn.Linear(8, 8) for _ in range(4)))
    costs = ((1.0, 2.0),) * 6

    def step_of(strategy):
        torch.manual_seed(0)
        for layer in model:
            layer.reset_parameters()
        options = Options(engine="eager", strategy=strategy, gradient_accumulation=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return compile_training(model, optimizer, options)

    x = torch.randn(4, 8)
    pipelined = Strategy("pipelined", ipus=2, costs=costs, schedule="gpipe")
    step = step_of(pipelined)
    loss = step(x)
    assert [call.direction for call in step.program.calls].count("forward") == 2
    assert torch.equal(loss, step_of(Strategy("sharded", ipus=2, costs=costs))(x))


def test_inference_has_one_order():
    class Forward(Chain):
        def forward(self, x):
            for stage, (ipu, layer) in enumerate(zip(self.ipus, self.layers, strict=True)):
                with Block(f"stage{stage}", ipu_id=ipu):
                    x = layer(x)
            return x

    options = Options(engine="eager", strategy=named("1f1b"), device_iterations=3)
    program = compile_inference(Forward([0, 1]), options)
    program.compile(torch.randn(6, 8))
    assert program.program.schedule == ""
    assert program.schedule.grid() == "ipu0  0  1  2  .\nipu1  .  0  1  2"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('schedule="gpipe"', 'schedule="1f2b"', "no schedule is called '1f2b'"),
        ('schedule="gpipe"', 'schedule="interleaved"', "multiple of 2 micro-batches"),
        ('order="pipelined", ', "", "only a pipeline for training has a schedule by name"),
    ],
)
def test_a_file_with_an_impossible_schedule_is_refused(old, new, problem):
    text = trained([0, 1], named("gpipe"), 3)[0].program.text()
    assert old in text
    with pytest.raises((ProgramError, ValueError), match=problem):
        Program.parse(text.replace(old, new, 1))


def test_a_pipeline_without_calls_is_refused():
    def without_calls(body):
        for one in body:
            if isinstance(one, Repeat):
                yield replace(one, body=tuple(without_calls(one.body)))
            elif not isinstance(one, Call):
                yield one

    program = trained([0, 1, 0, 1], named("interleaved"))[0].program
    bare = replace(program, body=tuple(without_calls(program.body)))
    with pytest.raises(ProgramError, match="calls functions"):
        check_loops(bare)
