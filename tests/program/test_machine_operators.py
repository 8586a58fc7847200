"""Check what programs say of the operators that an IPU runs for them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn

import ipu_dynamo
from ipu_dynamo import Block, Options, Strategy
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.options import Location, Locations, StageSpec
from ipu_dynamo.passes.pipeline import lower, whole_step
from ipu_dynamo.program import Load, Program, Store
from ipu_dynamo.program.machine_operators import machine_operators, machine_values
from ipu_dynamo.runtime.engines.stage_key import stage_key
from ipu_dynamo.testing import recipes
from ipu_dynamo.testing.kinds import KINDS
from tests.properties.running import draw_placement

# What only decides how this computer does it.
EMULATIONS = st.fixed_dictionaries(
    {
        "stochastic_rounding": st.booleans(),
        "floating_point_exceptions": st.booleans(),
        "outline": st.sampled_from([False, True, "auto"]),
        "without": st.sampled_from([(), ("UpcastHalfMatmuls",)]),
    }
)
HALF_KINDS = KINDS.keys() - {"double", "autocast", "half"}
HALVES = torch.ones(2, 4, dtype=torch.float16)
WITHOUT_UPCASTS = {"without": ("UpcastHalfMatmuls",)}


def program(model, args, options=None, *, training=False, loss=None):
    """The program of a model for one micro-batch."""
    capture = trace(model, read_arguments(model, args, {}), training=training)
    passes = whole_step(options or Options(), training=training, loss=loss)
    return lower(capture, passes)


def run_on_machine(program):
    """The operators that an IPU runs, with the place of each; where functions begin is left out."""
    return [
        (call.ipu, call.stage, call.phase, operator)
        for call, operators in machine_operators(program)
        for operator in operators
    ]


def written(operators):
    """Operators as `name(operands) -> results`, those of bodies indented."""
    for each in operators:
        operands, results = (", ".join(map(str, types)) for types in (each.operands, each.results))
        back = "back: " if each.direction == "backward" else ""
        yield f"{back}{each.operator.removesuffix('.default')}({operands}) -> {results}"
        for body in each.bodies:
            yield from (f"  {line}" for line in written(body))


def lines(model, *args, training=False, **options):
    """What the machine runs for a model; a program and its text agree."""
    made = program(model, args, Options(**options), training=training, loss=0 if training else None)
    found, read = (
        list(written(operator for *_, operator in run_on_machine(one)))
        for one in (made, Program.parse(made.text()))
    )
    assert read == found
    return found


@pytest.mark.quick(12)
@given(
    recipe=recipes(random=True, kinds=HALF_KINDS, dtypes=[torch.float16]),
    training=st.booleans(),
    partials=st.sampled_from(["half", "float"]),
    emulation=EMULATIONS,
    data=st.data(),
)
def test_machine_runs_the_same_operators_however_they_are_emulated(
    recipe, training, partials, emulation, data
):
    model, placement = recipe.build(), draw_placement(data, recipe)
    placement.place(model)
    count = placement.micro_batches(training=training)
    options = Options(
        strategy=placement.strategy,
        gradient_accumulation=count,
        device_iterations=count,
        partials=partials,
        convolution_partials=partials,
        outline=False,
    )
    arguments = recipe.data(1)
    plain = program(model, arguments, options, training=training)
    other = program(model, arguments, replace(options, **emulation), training=training)
    note(str(plain))
    note(str(other))
    assert run_on_machine(other) == run_on_machine(plain)
    assert run_on_machine(Program.parse(other.text())) == run_on_machine(other)


class Dropouts(nn.Module):
    """Equal layers with dropout on two IPUs, in half precision."""

    def __init__(self, count=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.half()

    def forward(self, x):
        half = len(self.layers) // 2
        for ipu, layers in enumerate((self.layers[:half], self.layers[half:])):
            with Block(f"ipu{ipu}", ipu):
                for layer in layers:
                    x = F.dropout(layer(x), 0.5).relu()
                total = x.float().sum()
        return total


@pytest.mark.few(2)
@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("outline", [False, True])
def test_dropout_is_one_operator_and_its_mask_is_drawn_again(outline, rounding):
    found = lines(
        Dropouts(6),
        HALVES,
        training=True,
        strategy=Strategy(kind="pipelined"),
        gradient_accumulation=4,
        outline=outline,
        stochastic_rounding=rounding,
        recompute="off",
    )
    drop = "native_dropout(f16[2,4]) -> f16[2,4]"
    assert found[:3] == [
        "aten.addmm(f16[4], f16[2,4], f16[4,4]) -> f16[2,4]",
        f"aten.{drop}",
        "aten.relu(f16[2,4]) -> f16[2,4]",
    ]
    assert found.count(f"aten.{drop}") == 6
    assert found.count("back: aten.native_dropout_backward(f16[2,4]) -> f16[2,4]") == 6
    assert not any("i32" in line or "b8" in line for line in found)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (torch.rand_like, "aten.rand_like() -> f16[2,4]"),
        (torch.bernoulli, "aten.bernoulli(f16[2,4]) -> f16[2,4]"),
        (lambda x: torch.normal(x, 2.0), "aten.normal.Tensor_float(f16[2,4]) -> f16[2,4]"),
        (
            lambda x: F.rrelu(x, training=True),
            "aten.rrelu_with_noise_functional(f16[2,4]) -> f16[2,4]",
        ),
        (lambda x: torch.native_dropout(x, 0.5, True)[1], "aten.native_dropout() -> b8[2,4]"),
        (lambda x: x.multinomial(2).half(), "aten.multinomial(f16[2,4]) -> i64[2,2]"),
    ],
)
@pytest.mark.parametrize("rounding", [False, True])
def test_a_draw_is_one_operator(draw, expected, rounding):
    found = lines(lambda x: (draw(x), x.exp()), HALVES, stochastic_rounding=rounding)
    assert [line for line in found if line.startswith(expected.partition("(")[0])] == [expected]
    assert [line for line in found if "_to_copy" not in line][1:] == [
        "aten.exp(f16[2,4]) -> f16[2,4]"
    ]


def repeat(x):
    return ipu_dynamo.for_loop(3, lambda c: F.dropout(c, 0.5).exp(), [x])[0]


def choose(x):
    return torch.cond(x.sum() > 0, lambda c: F.dropout(c, 0.5).exp(), lambda c: c.sin(), (x,))


BODY = ["  aten.native_dropout(f32[2,4]) -> f32[2,4]", "  aten.exp(f32[2,4]) -> f32[2,4]"]


def test_draws_in_bodies_are_one_operator():
    x = HALVES.float()
    assert lines(repeat, x) == ["ipu.loop(f32[2,4]) -> f32[2,4]", *BODY]
    assert lines(choose, x)[2:] == [
        "ipu.branch(b8[], f32[2,4]) -> f32[2,4]",
        *BODY,
        "  aten.sin(f32[2,4]) -> f32[2,4]",
    ]


def test_backward_loop_reads_no_mask_that_the_forward_loop_has_drawn():
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return repeat(self.linear(x)).sum()

    found = lines(Repeated(), HALVES.float(), training=True)
    start = found.index("back: ipu.loop(f32[2,4], f32[3,2,4]) -> f32[2,4]")
    assert found[start + 2] == "  back: aten.native_dropout_backward(f32[2,4]) -> f32[2,4]"


def test_norms_keep_unrounded_values_for_the_backward_pass():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4).half()

        def forward(self, x):
            return self.norm(x).float().sum()

    found = lines(Norm(), HALVES, training=True, stable_norm=True)
    norm = "aten.native_layer_norm"
    assert [line for line in found if norm in line] == [
        f"{norm}(f16[2,4], f16[4], f16[4]) -> f16[2,4], f32[2,1], f32[2,1]",
        f"back: {norm}_backward(f16[2,4], f16[2,4], f32[2,1], f32[2,1], f16[4], f16[4]) "
        "-> f16[4], f16[4]",
    ]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "aten.convolution"),
        (WITHOUT_UPCASTS, "aten.convolution"),
        ({"convolution_partials": "half"}, "ipu.half_partials_conv"),
        ({"convolution_partials": "half", "stochastic_rounding": True}, "ipu.half_partials_conv"),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_one_operator_in_any_layout(layout, options, name):
    x, weight = (
        torch.ones(shape, dtype=torch.float16).to(memory_format=layout)
        for shape in ((2, 4, 6, 6), (4, 4, 3, 3))
    )
    assert lines(lambda x, w: F.conv2d(x, w).exp(), x, weight, **options) == [
        f"{name}(f16[2,4,6,6], f16[4,4,3,3]) -> f16[2,4,4,4]",
        "aten.exp(f16[2,4,4,4]) -> f16[2,4,4,4]",
    ]


def test_a_copy_to_the_layout_of_a_result_is_nothing():
    """With half partials the bias is added to a product that is dense in another order."""
    x, weight = (
        torch.ones(shape, dtype=torch.float16).to(memory_format=torch.channels_last)
        for shape in ((2, 4, 6, 6), (4, 4, 3, 3))
    )
    bias = torch.ones(4, dtype=torch.float16)
    assert lines(
        lambda *tensors: F.conv2d(*tensors), x, weight, bias, convolution_partials="half"
    ) == [
        "ipu.half_partials_conv(f16[2,4,6,6], f16[4,4,3,3]) -> f16[2,4,4,4]",
        "aten.add.Tensor(f16[2,4,4,4], f16[4,1,1]) -> f16[2,4,4,4]",
    ]


def test_several_results_have_types_of_their_own():
    """Stochastic rounding computes all of them in float32; the machine does that for statistics."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x).float().sum()

    plain = lines(Norm(), HALVES, training=True)
    assert any("batch_norm" in line and "f16[2,4], f32[4]" in line for line in plain)
    assert lines(Norm(), HALVES, training=True, stochastic_rounding=True) == plain


class Transposed(nn.Module):
    """A weight whose gradient is a view of a value that is a result, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4, 4).half()) for _ in range(2))

    def forward(self, x):
        return (x * (self.a.t() + self.b)).float().sum()


def test_checks_and_copies_of_memory_are_nothing():
    x = torch.ones(4, 4, dtype=torch.float16)
    options = Options(floating_point_exceptions=True)
    made = program(Transposed(), (x,), options, training=True, loss=0)
    text = made.text()
    assert "ipu.own_memory" in text
    assert "ipu.check_floating_point" in text
    found = lines(Transposed(), x, training=True, floating_point_exceptions=True)
    assert not any("check" in line or "clone" in line for line in found)


class InTwoFloats(nn.Module):
    """A product of halves, and the same steps in float32 that the user asks for."""

    def forward(self, x, w):
        with Block("half", 0):
            x = x @ w
        with Block("float", 1):
            return (x.float() @ w.float()).half()


def test_functions_that_only_marks_distinguish_share_their_code():
    square = torch.ones(4, 4, dtype=torch.float16)
    made = program(InTwoFloats(), (square, square), Options(strategy=Strategy(kind="sharded")))
    ours, users = made.functions
    assert ours.key != users.key
    assert ours.code_key == users.code_key
    assert stage_key(ours, {}) == stage_key(users, {})
    assert lines(InTwoFloats(), square, square, strategy=Strategy(kind="sharded")) == [
        "aten.mm(f16[4,4], f16[4,4]) -> f16[4,4]",
        "aten._to_copy(f16[4,4]) -> f32[4,4]",
        "aten._to_copy(f16[4,4]) -> f32[4,4]",
        "aten.mm(f32[4,4], f32[4,4]) -> f32[4,4]",
        "aten._to_copy(f32[4,4]) -> f16[4,4]",
    ]


def test_bodies_that_only_marks_distinguish_share_their_code():
    def ours(x, w):
        return ipu_dynamo.for_loop(3, lambda c: c @ w, [x])[0]

    def users(x, w):
        return ipu_dynamo.for_loop(3, lambda c: (c.float() @ w.float()).half(), [x])[0]

    square = torch.ones(4, 4, dtype=torch.float16)
    made = [program(model, (square, square)).functions for model in (ours, users)]
    assert [a.key == b.key for a, b in zip(*made, strict=True)] == [False, False]
    assert [a.code_key == b.code_key for a, b in zip(*made, strict=True)] == [True, True]
    assert made[0][-1].code_key != made[0][0].code_key


def test_values_of_the_machine_have_its_types():
    made = program(
        Dropouts(),
        (HALVES,),
        Options(
            strategy=Strategy(kind="pipelined"),
            gradient_accumulation=4,
            recompute="off",
            stochastic_rounding=True,
        ),
        training=True,
        loss=0,
    )
    values = machine_values(made)
    masks = [n for f in made.functions for n in f.operators if n.meta["val"].dtype == torch.bool]
    assert any(n.name in values for n in masks)
    assert all(values.get(n.name) is None for n in masks)
    copied = [copy.result for copy in made.copies if copy.value in values]
    assert copied
    assert {str(values[name]) for name in copied} == {"f16[2,4]"}


def test_serial_steps_of_a_product_are_numbered():
    """Also where the product is computed in float32, with half partials, and read from text."""

    def product(x, w):
        return ipu_dynamo.serialized_matmul(x, w, "output_channels", 2)

    square = torch.ones(4, 4, dtype=torch.float16)
    for partials in ("float", "half"):
        made = program(product, (square, square), Options(partials=partials))
        read = Program.parse(made.text())
        for one in (made, read):
            ((_, operators),) = machine_operators(one)
            steps = [each.node.meta.get("ipu.serial_step") for each in operators]
            assert steps == ["1/2", "2/2", None]
    code = [f.code_key for f in made.functions]
    for node in made.functions[0].operators:
        node.meta.pop("ipu.serial_step", None)
    assert code == [f.code_key for f in made.functions]


def test_text_has_memory_proportions_and_the_sync_pattern():
    strategy = Strategy(kind="pipelined")
    options = Options(
        strategy=strategy, memory_proportion={1: 0.2}, sync_pattern="single_pipeline",
        gradient_accumulation=4,
    )  # fmt: skip
    made = program(Dropouts(), (HALVES,), options, training=True, loss=0)
    assert made.memory_proportions == (0.6, 0.2)
    assert "memory proportions 0.6, 0.2, sync pattern single pipeline" in str(made)
    assert Program.parse(made.text()) == made
    plain = replace(options, memory_proportion=0.6, sync_pattern="full")
    text = program(Dropouts(), (HALVES,), plain, training=True, loss=0).text()
    assert text == replace(made, memory_proportions=(), sync_pattern="full").text()
    assert "proportion" not in text
    with pytest.raises(ValueError, match="memory proportions"):
        Program.parse(made.text().replace("(0.6, 0.2)", "(0.6,)"))


@pytest.mark.parametrize("tiles", [0, 32])
def test_loads_and_stores_through_io_tiles_are_marked(tiles):
    through = {"io_tiles_to_load": True, "io_tiles_to_store": True}
    options = Options(
        io_tiles=tiles,
        locations=Locations(
            weights=Location(off_chip=True, io_tiles_to_load=True),
            accumulators=Location(off_chip=True, io_tiles_to_store=True),
            activations=Location(off_chip=True, **through),
        ),
        strategy=Strategy(
            kind="serial_phased",
            phases=((StageSpec(("ipu0",)),), (StageSpec(("ipu1",)),)),
            liveness="off_chip_after_each_phase",
        ),
    )
    made = program(Dropouts(), (HALVES,), options, training=True, loss=0)
    kinds = {variable.name: variable.kind for variable in made.variables}
    moves = [step for step in made.walk() if isinstance(step, Load | Store)]
    found = {(type(m), kinds.get(m.value, "activation")) for m in moves if m.io_tiles}
    activations = {(Load, "activation"), (Store, "activation")}
    assert found == (
        {(Load, "parameter"), (Store, "accumulator"), *activations} if tiles else set()
    )
    assert all(("through IO tiles" in str(move)) == move.io_tiles for move in moves)
    assert Program.parse(made.text()) == made


class Shares(nn.Module):
    """Equal layers, each with a share of memory of its own, and a serialised product."""

    def __init__(self, shares):
        super().__init__()
        self.shares = shares
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in shares)
        self.half()

    def forward(self, x, w):
        for share, layer in zip(self.shares, self.layers, strict=True):
            x = ipu_dynamo.set_available_memory(layer(x).relu(), share)
        x = ipu_dynamo.serialized_matmul(x, w, "output_channels", 2)
        return ipu_dynamo.set_available_memory(x, 0.5).float().sum()


def shares_of(program):
    """Operators that have a share of memory of their own, with their directions."""
    operators = [operator for *_, operator in run_on_machine(program)]
    return [(o.direction, s) for o in operators if (s := o.node.meta.get("ipu.memory")) is not None]


@pytest.mark.parametrize("partials", ["float", "half"])
def test_a_share_of_memory_reaches_an_operator_and_its_gradients(partials):
    shares = (0.0, 0.125, 0.25, 0.375, 0.4, 1.0)
    square = torch.ones(4, 4, dtype=torch.float16)
    options = Options(partials=partials)
    made = program(Shares(shares), (square, square), options, training=True, loss=0)
    back = [("backward", share) for share in (0.5, 0.5, *reversed(shares))]
    found = shares_of(made)
    assert found[:8] == [("forward", share) for share in (*shares, 0.5, 0.5)]
    assert list(dict.fromkeys(found[8:])) == list(dict.fromkeys(back))
    assert shares_of(Program.parse(made.text())) == found
    text = made.text().replace('"ipu.memory": 0.125', '"ipu.memory": 1.25')
    with pytest.raises(ValueError, match="a node may be marked"):
        Program.parse(text)


@pytest.mark.parametrize("share", [None, 0.25])
def test_convolutions_have_the_share_of_the_options_unless_they_have_their_own(share):
    convolutions = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)]).half()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolutions = convolutions

        def forward(self, x):
            first, second = self.convolutions
            return ipu_dynamo.set_available_memory(second(first(x)), 0.5) @ x

    options = Options(convolution_memory_proportion=share)
    image = torch.ones(1, 4, 4, 4, dtype=torch.float16)
    found = [share for _, share in shares_of(program(Model(), (image,), options))]
    assert found == [*([] if share is None else [share]), 0.5]
    with pytest.raises(ipu_dynamo.options.OptionError, match="from 0 to 1"):
        Options(convolution_memory_proportion=2)


def test_a_share_of_memory_without_an_operator_changes_nothing():
    def model(x):
        return ipu_dynamo.set_available_memory(x.exp().sin().cos().tan(), 0.5)

    assert "ipu.memory" not in program(model, (HALVES,)).text()
    assert torch.equal(model(HALVES), HALVES.exp().sin().cos().tan())
    for share in (1.5, True, "0.5"):
        with pytest.raises(ipu_dynamo.options.OptionError, match="from 0 to 1"):
            ipu_dynamo.set_available_memory(HALVES, share)


def test_equal_blocks_of_a_backward_pass_and_of_both_passes_are_one_function():
    options = Options(
        strategy=Strategy(kind="pipelined"), gradient_accumulation=4, outline=True, recompute="off"
    )
    made = program(Dropouts(8), (HALVES,), options, training=True, loss=0)
    callers = {
        function.name: {call.direction for call in made.calls if call.function == function.name}
        for function in made.functions
    }
    assert {"backward", "forward_backward"} in callers.values()
