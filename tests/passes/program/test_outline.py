"""Check that repeated blocks become one function, and that this changes no bit."""

import dataclasses
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import ipu_dynamo
from ipu_dynamo import (
    BeginBlock,
    CompileError,
    Options,
    StageSpec,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.options import OptionError
from ipu_dynamo.passes.graph.repeats import LEAST, find_runs
from ipu_dynamo.program import Program
from ipu_dynamo.program.schedule.stage_passes import stage_passes
from ipu_dynamo.testing import BlockPlacement, assert_same_bits, assert_same_training, recipes
from ipu_dynamo.testing.kinds import KINDS
from ipu_dynamo.testing.recipe import Recipe, Step
from tests.properties.running import draw_placement, outcome

EAGER = {"engine": "eager", "seed": 1}
ROWS, WIDTH = 4, 8


class Layer(nn.Module):
    """A pre-norm layer with dropout on `[rows, width]`."""

    def __init__(self, *, width=WIDTH, hidden=2 * WIDTH, dropout=0.0, factor=1.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout, self.factor = dropout, factor

    def forward(self, x):
        h = torch.dropout(torch.tanh(self.up(self.norm(x))), self.dropout, self.training)
        return x + self.down(h) * self.factor


class Deep(nn.Module):
    """Layers between two products.

    Args:
        cuts: layers that begin a stage.
        marks: mark the input of every layer.
    """

    def __init__(self, layers, *, cuts=(), marks=False):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers, self.marks = nn.ModuleList(layers), marks
        for ipu, cut in enumerate(cuts, 1):
            BeginBlock(self.layers[cut], ipu_id=ipu)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(ipu_dynamo.recomputation_checkpoint(x) if self.marks else x)
        return ipu_dynamo.identity_loss(self.last(x).square(), "mean")


def train(model, dtype=torch.float32, **options):
    """Two steps from fixed weights; the program, and what it leaves behind."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = Options(**{**EAGER, "outline": True, **options})
    step = compile_training(model, optimizer, options)
    rows = ROWS * options.gradient_accumulation * options.replicas
    x = torch.randn(rows, WIDTH, generator=generator).to(dtype)
    losses = [step(x) for _ in range(2)]
    return step.program, [*losses, *(p.detach() for p in model.parameters())]


def blocks(program):
    """How often the functions that stand for blocks are called."""
    called = Counter(call.function for call in program.calls)
    return {name: times for name, times in called.items() if "_block" in name}


@pytest.mark.examples(500)
@pytest.mark.quick(8)
@given(
    recipe=recipes(kinds=KINDS.keys(), max_steps=3, random=True),
    repeats=st.integers(3, 5),
    training=st.booleans(),
    data=st.data(),
    recompute=st.sampled_from(["off", "stages", "all", "budget"]),
)
def test_random_models_give_the_same_bits(recipe, repeats, training, data, recompute):
    recipe = dataclasses.replace(recipe, steps=recipe.steps * repeats)
    placement = draw_placement(data, recipe)
    chosen = {"recompute": recompute}
    if recompute == "budget":
        chosen = {"recompute_budget": data.draw(st.integers(1, 999))}
    count = placement.micro_batches(training=training)
    loop = "gradient_accumulation" if training else "device_iterations"
    off = Options(**EAGER, **chosen, **{loop: count}, strategy=placement.strategy, outline=False)
    on = dataclasses.replace(off, outline=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "recompute_budget", UserWarning)
        try:
            expected = outcome(recipe, placement, off, training=training)
        except CompileError as error:  # a step that is repeated may change what PyTorch has saved
            assume("modified by an inplace operation" not in str(error))
            raise
        assert_same_bits(outcome(recipe, placement, on, training=training), expected)


def test_a_part_may_begin_with_blocks_that_draw():
    """What the blocks count from is made before the first of them, and behind the inputs."""
    recipe = Recipe((Step("drop"), Step("add", y=2)) * 3, width=1)
    on = Options(**EAGER, outline=True)
    off = dataclasses.replace(on, outline=False)
    ours, theirs = (outcome(recipe, BlockPlacement(), one, training=False) for one in (on, off))
    assert_same_bits(ours, theirs)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("marks", "options"),
    [
        (False, {}),
        (True, {"recompute": "all"}),
        (False, {"gradient_accumulation": 3, "mean_strategy": "running"}),
        (False, {"gradient_accumulation": 2, "replicas": 2}),
        (True, {"dtype": torch.float16, "partials": "half", "partials_chunk": 16}),
        pytest.param(
            True,
            {"dtype": torch.float16, "stochastic_rounding": True},
            marks=pytest.mark.slow,  # as the next, but for recomputation
        ),
        (False, {"dtype": torch.float16, "stochastic_rounding": True, "recompute": "all"}),
    ],
    ids=str,
)
def test_equal_layers_are_one_function_and_give_the_same_bits(marks, options):
    def model():
        return Deep([Layer(dropout=0.2) for _ in range(6)], marks=marks)

    program, found = train(model(), **options)
    plain, wanted = train(model(), outline=False, **options)
    assert_same_bits(found, wanted)
    assert blocks(plain) == {}
    assert len(blocks(program)) == 2  # forward and backward
    assert min(blocks(program).values()) >= 4  # what is different at the ends may be apart
    assert Program.parse(program.text()) == program


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["grouped", "zero_bubble"])
def test_stages_of_a_pipeline_share_blocks(schedule):
    def model():
        return Deep([Layer(dropout=0.1) for _ in range(8)], cuts=[4])

    strategy = Strategy("pipelined", schedule=schedule)
    options = {"strategy": strategy, "gradient_accumulation": 4, "workers": 2}
    program, found = train(model(), **options, recompute="off")
    plain, wanted = train(model(), outline=False, **options, recompute="off")
    assert_same_bits(found, wanted)
    assert blocks(program)["forward0_block"] == 8
    assert [call.ipu for call in program.calls if call.function == "forward0_block"] == [
        *[0] * 4,
        *[1] * 4,
    ]
    assert len(stage_passes(program.calls)) == len(plain.calls)


def test_views_between_blocks_of_one_phase_go_off_the_chip():
    """A block's heads are views of what the part before it computed, kept for the backward pass."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, norm_first=True)
                for _ in range(4)
            )
            for number in (0, 2):
                BeginBlock(self.layers[number], f"half{number}")

        def forward(self, x):
            x = x[None] * 1.5
            for layer in self.layers:
                x = layer(x)
            return ipu_dynamo.identity_loss(x.square(), "mean")

    phases = tuple((StageSpec((f"half{number}",), 0),) for number in (0, 2))
    strategy = Strategy(kind="serial_phased", phases=phases, liveness="off_chip_after_fwd")
    program, found = train(Encoder(), strategy=strategy)
    plain, wanted = train(Encoder(), strategy=strategy, outline=False)
    assert blocks(program)
    assert blocks(plain) == {}
    assert_same_bits(found, wanted)


def test_the_schedule_of_a_pipeline_is_that_of_its_turns():
    def schedule(outline):
        model = Deep([Layer() for _ in range(8)], cuts=[4])
        strategy = Strategy("pipelined")
        options = Options(
            **EAGER, strategy=strategy, gradient_accumulation=4, outline=outline, recompute="off"
        )
        step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
        step(torch.randn(ROWS * 4, WIDTH))
        return step

    on, off = schedule(True), schedule(False)
    assert on.schedule.grid() == off.schedule.grid()
    assert on.schedule.svg().count("<rect") == off.schedule.svg().count("<rect")
    assert [s.copies for s in on.program.stash] == [s.copies for s in off.program.stash]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "different",
    [
        {"factor": 0.5},
        {"dropout": 0.3},
        {"hidden": 2 * WIDTH + 1},
    ],
    ids=str,
)
def test_almost_equal_layers_are_not_one_function(different):
    """Six layers, of which every other one differs: blocks of two layers, three of them."""
    kinds = [{"dropout": 0.1}, {"dropout": 0.1, **different}]
    model = Deep([Layer(**kind) for kind in kinds * 3])
    program, _ = train(model)
    assert set(blocks(program).values()) == {3}
    model = Deep([Layer(**kinds[0]), Layer(**kinds[1]), Layer(**kinds[0])])
    assert blocks(train(model)[0]) == {}


def test_inference_calls_one_function():
    model = Deep([Layer() for _ in range(5)]).eval()
    x = torch.randn(ROWS, WIDTH)
    run = compile_inference(model, Options(**EAGER, outline=True))
    torch.testing.assert_close(run(x), model(x))
    assert blocks(run.program) == {"forward0_block": 5}


def test_statistics_of_batch_norm_train():
    def layer():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())

    def model():
        torch.manual_seed(0)
        return Deep([layer() for _ in range(4)])

    options = Options(**EAGER, outline=True)
    run = assert_same_training(model(), [(torch.randn(ROWS, WIDTH),)] * 2, options)
    assert set(blocks(run.program).values()) == {4}


def test_small_blocks_are_left_alone_unless_wanted():
    layers = [Layer() for _ in range(6)]
    assert blocks(train(Deep(layers), outline="auto")[0]) == {}
    assert blocks(train(Deep(layers), outline=True)[0])
    large = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    run = compile_inference(large, Options(**EAGER))
    run(torch.ones(256, 512))
    assert blocks(run.program) == {"forward0_block": 6}


def test_an_operator_that_fails_is_found_in_its_block():
    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(5, WIDTH) for _ in range(4))

        def forward(self, ids):
            return sum(torch.tanh(table(ids)) for table in self.tables)

    run = compile_inference(Looked(), Options(**EAGER, outline=True))
    assert run(torch.tensor([1, 2])).shape == (2, WIDTH)
    with pytest.raises(ipu_dynamo.errors.ExecutionError, match=r"aten\.embedding(.|\n)*tables"):
        run(torch.tensor([1, 9]))


@pytest.mark.parametrize("value", [1, 0, "always", None])
def test_other_values_are_refused(value):
    with pytest.raises(OptionError, match="option outline is"):
        Options(outline=value)


@given(
    before=st.lists(st.integers(0, 3), max_size=5),
    period=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    count=st.integers(LEAST, 6),
    after=st.lists(st.integers(4, 9), max_size=5),
)
def test_what_repeats_is_found(before, period, count, after):
    sequence = [*before, *period * count, *after]
    runs = find_runs(sequence)
    taken = [index for run in runs for index in range(run.start, run.stop)]
    assert len(set(taken)) == len(taken)
    for run in runs:
        assert run.count >= LEAST
        for index in range(run.start, run.stop - run.period):
            assert sequence[index] == sequence[index + run.period]
    saved = sum((run.count - 1) * run.period for run in runs)
    assert saved >= (count - 1) * len(period) - len(period)
