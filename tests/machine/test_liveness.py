"""Check the bytes that IPUs hold at each step against an interpreter that counts them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn

import ipu_dynamo
from ipu_dynamo import Block, Options, Strategy
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.passes.pipeline import lower, whole_step
from ipu_dynamo.program.liveness import liveness
from ipu_dynamo.testing import options_for, recipes
from ipu_dynamo.whole_step.optimizer.torch_optimizers import describe
from ipu_dynamo.whole_step.optimizer.traced_optimizer import TracedOptimizer
from tests.machine.memory_interpreter import Interpreter
from tests.properties.running import draw_placement

RULES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
TRACED = {"adagrad": torch.optim.Adagrad}


def program(model, args, options, *, training, optimizer="sgd", loss=0):
    """The program of a model for one micro-batch."""
    capture = trace(model, read_arguments(model, args, {}), training=training)
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    made = (RULES | TRACED)[optimizer](list(names.values()), lr=0.1)
    reader = describe if optimizer in RULES else TracedOptimizer(options).describe
    groups = reader(made, names) if training else ()
    return lower(
        capture,
        whole_step(options, training=training, loss=loss if training else None, groups=groups),
    )


def assert_same_bytes(made, *, in_place=False):
    """Compare each step of a program with the interpreter."""

    def takes_over(operator):
        return in_place and sum(map(ord, operator.operator)) % 2 == 0

    expected = Interpreter(made, lambda type_: type_.nbytes, takes_over)
    found = liveness(made, in_place=takes_over)
    for each in found:
        assert list(each.nbytes) == expected.bytes_of(each.ipu), f"ipu{each.ipu}"
    return found


@pytest.mark.examples(200)
@pytest.mark.quick(16)
@given(
    recipe=recipes(random=True, dtypes=[torch.float32, torch.float16]),
    training=st.booleans(),
    optimizer=st.sampled_from(sorted(RULES)),
    in_place=st.booleans(),
    data=st.data(),
)
def test_each_step_holds_the_bytes_of_its_live_values(recipe, training, optimizer, in_place, data):
    placement = draw_placement(data, recipe)
    options = replace(
        data.draw(options_for(placement=placement, training=training)),
        recompute=data.draw(st.sampled_from(["auto", "all", "stages"])),
        outline=data.draw(st.booleans()),
        io_tiles=data.draw(st.sampled_from([0, 32])),
    )
    model = placement.place(recipe.build())
    made = program(
        model, recipe.data(1), options, training=training, optimizer=optimizer, loss=None
    )
    note(str(made))
    assert_same_bytes(made, in_place=in_place)


class Stages(nn.Module):
    """Equal layers on IPUs of their own, and maybe a head on the first one."""

    def __init__(self, ipus, width=4, head=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(ipus))
        self.head, self.head_ipu = nn.Linear(width, width), head

    def forward(self, x):
        for ipu, layer in enumerate(self.layers):
            with Block(f"stage {ipu}", ipu):
                x = layer(x).tanh()
        with Block("head", len(self.layers) - 1 if self.head_ipu is None else self.head_ipu):
            return self.head(x).sum()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_stashes_as_many_micro_batches_as_poptorch(stages):
    strategy = Strategy("pipelined")
    options = Options(strategy=strategy, gradient_accumulation=8, recompute="stages")
    made = program(Stages(stages), (torch.ones(2, 4),), options, training=True)
    copies = []
    for each in assert_same_bytes(made):
        kept = [tensor for tensor in each.tensors if tensor.role == "stash"]
        copies.append({tensor.copies for tensor in kept} or {1})
        assert all(tensor.nbytes == tensor.copies * tensor.type.nbytes for tensor in kept)
    assert copies == [{2 * (stages - 1 - stage) + 1} for stage in range(stages)]


def test_a_stage_on_an_earlier_ipu_waits_in_the_stash():
    options = Options(strategy=Strategy("pipelined"), gradient_accumulation=9, recompute="stages")
    made = program(Stages(4, head=0), (torch.ones(2, 4),), options, training=True)
    copies = [
        max((t.copies for t in each.tensors if t.role == "stash"), default=1)
        for each in assert_same_bytes(made)
    ]
    assert copies == [9, 7, 5, 3]


class Placed(nn.Module):
    """A layer for each stage, on the IPUs of a list."""

    def __init__(self, ipus):
        super().__init__()
        self.ipus = ipus
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in ipus)

    def forward(self, x):
        for stage, (ipu, layer) in enumerate(zip(self.ipus, self.layers, strict=True)):
            with Block(f"stage {stage}", ipu):
                x = layer(x).tanh()
                if stage == len(self.ipus) - 1:
                    return x.sum()
        raise AssertionError


@pytest.mark.parametrize(
    ("schedule", "ipus"),
    [
        ("grouped", [0, 1, 2, 3]),
        ("zero_bubble", [0, 1, 2, 3, 4]),
        ("gpipe", [0, 1, 2]),
        ("1f1b", [0, 1, 2, 3]),
        ("interleaved", [0, 1, 0, 1]),
        ("zb_h1", [0, 1, 2, 3]),
        ("zb_v", [0, 1, 2, 2, 1, 0]),
    ],
)
def test_the_stash_of_a_program_is_that_of_its_ipus(schedule, ipus):
    strategy = Strategy("pipelined", schedule=schedule)
    options = Options(strategy=strategy, gradient_accumulation=10, recompute="off")
    made = program(Placed(ipus), (torch.ones(2, 4),), options, training=True)
    stashed, expected = {}, {}
    for each in liveness(made):
        tensors = (tensor for tensor in each.tensors if tensor.role == "stash")
        stashed |= {(each.ipu, tensor.name): tensor.copies for tensor in tensors}
    for kept in made.stash:
        for depth, (name, _) in zip(kept.depths, kept.values, strict=True):
            if depth > 1:  # two stages of an IPU may keep the same value
                key = kept.ipu, name
                expected[key] = max(depth, expected.get(key, 0))
    assert stashed == expected


def test_gradients_of_weights_that_wait_keep_what_they_need():
    strategy = Strategy("pipelined", schedule="zero_bubble")
    options = Options(strategy=strategy, gradient_accumulation=9)
    made = program(Stages(4), (torch.ones(2, 4),), options, training=True)
    assert any(call.direction == "weights" for call in made.calls)
    assert_same_bytes(made)


class Repeated(nn.Module):
    """Equal layers, large enough to be outlined."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.sum()


@pytest.mark.parametrize("off_chip", [False, True])
def test_outlining_changes_no_byte(off_chip):
    x, peaks = torch.ones(4, 8), set()
    locations = ipu_dynamo.options.Locations()
    if off_chip:
        location = ipu_dynamo.options.Location(off_chip=True, min_elements=1)
        locations = replace(locations, weights=location, optimizer_state=location)
    for outline in (False, True):
        options = Options(outline=outline, locations=locations)
        made = program(Repeated(6), (x,), options, training=True, optimizer="adam")
        (found,) = assert_same_bytes(made)
        runs = [n for n, step in enumerate(found.steps) if step.operator is not None]
        assert (len(made.functions) > 1) == outline
        peaks.add(tuple(found.nbytes[step] for step in runs))
    assert len(peaks) == 1


class Flows(nn.Module):
    """A loop that carries and stacks values, one within another, and a branch."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x):
        def twice(c):
            (c,) = ipu_dynamo.for_loop(2, lambda d: (d @ self.w).tanh(), [c])
            return c.exp() - 1

        (x,) = ipu_dynamo.for_loop(3, twice, [x])
        x = torch.cond(x.sum() > 0, lambda c: (c.exp() @ self.w).sin(), lambda c: c.cos(), (x,))
        return x.sum()


@pytest.mark.parametrize("training", [False, True])
def test_a_loop_holds_a_round_of_its_body(training):
    made = program(Flows(), (torch.ones(4, 4),), Options(), training=training)
    (found,) = assert_same_bytes(made, in_place=True)
    assert sum(bool(step.operator and step.operator.bodies) for step in found.steps) >= 3


@pytest.mark.parametrize("optimizer", sorted(TRACED))
def test_a_traced_update_holds_the_values_of_one_parameter(optimizer):
    made = program(Repeated(3), (torch.ones(4, 8),), Options(), training=True, optimizer=optimizer)
    (found,) = assert_same_bytes(made)
    assert found.steps[-1].operator is not None
    largest = max(found.changing()[-12:])
    assert 0 < largest < 2 * 8 * 8 * 4 + 100


class Skipped(nn.Module):
    """A value that passes a stage by."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x):
        with Block("first", 0):
            x = x @ self.w
        with Block("second", 1):
            y = x.tanh()
        with Block("third", 2):
            return (x * y).sum()


def test_a_value_that_passes_a_stage_waits_in_the_stash():
    options = Options(strategy=Strategy("pipelined"), gradient_accumulation=5)
    made = program(Skipped(), (torch.ones(2, 4),), options, training=True)
    *_, last = assert_same_bytes(made)
    assert [t.copies for t in last.tensors if t.role == "stash"] == [2]
