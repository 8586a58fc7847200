"""Check what the operators of calls cost: roles of operands, loops, branches and groups."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn

import ipu_dynamo
from ipu_dynamo import ConvolutionGroup, Options
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.machine import machines
from ipu_dynamo.machine.call_costs import Argument, price_call
from ipu_dynamo.machine.cost import Resources
from ipu_dynamo.passes.pipeline import lower, whole_step
from ipu_dynamo.program.machine_operators import machine_operators
from ipu_dynamo.testing import recipes
from tests.models import CASES
from tests.program.test_machine_operators import program

BOW = machines["bow"].ipu
BARRIER = float(BOW.sync)


def priced(model, *args, ipu=BOW, input_origin="value", dies=True, **options):
    """Each operator with its cost, of a model in inference; parameters are weights."""
    made = program(model.eval(), args, Options(**options))
    weights = {variable.name for variable in made.variables}
    return [
        pair
        for call, operators in machine_operators(made)
        for pair in zip(
            operators,
            price_call(
                operators,
                [
                    Argument("weight") if name in weights else Argument(input_origin, dies)
                    for name in call.arguments
                ],
                Resources(ipu),
            ),
            strict=True,
        )
    ]


def cost_of(name, pairs):
    """The cost of the operators of a name."""
    (cost,) = (cost for operator, cost in pairs if name in operator.operator)
    return cost


class Product(nn.Module):
    """A product of an input by a weight, in another layout, or by itself."""

    def __init__(self, by, uses=1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))
        self.by, self.uses = by, uses

    def forward(self, x):
        other = self.weight.t().contiguous() if self.by == "weight" else x.exp()
        product = x @ other
        return product if self.uses == 1 else (product, x + 1)


def test_a_weight_is_not_rearranged_and_views_and_copies_of_it_neither():
    x = torch.ones(32, 64)
    by_weight = cost_of("mm", priced(Product("weight"), x))
    bytes_of_tile = 4 * 32 * 64 / 1472
    rearranged = 587 + bytes_of_tile * (1 / (4 * 0.85) + 3 * 0.44)
    assert by_weight.relayout == pytest.approx(1.5 * rearranged + 0.5 * rearranged)


class Normed(nn.Module):
    """A product of one of several results of an operator."""

    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(64), nn.Parameter(torch.ones(64, 64))

    def forward(self, x):
        return self.norm(x) @ self.weight


def test_one_of_several_results_is_no_weight():
    x = torch.ones(32, 64)
    assert cost_of("mm", priced(Normed(), x)) == cost_of("mm", priced(Product("weight"), x))


def test_two_activations_are_rearranged():
    x = torch.ones(64, 64)
    bytes_of_tile = 4 * 64 * 64 / 1472
    rearranged = 587 + bytes_of_tile * (1 / (4 * 0.85) + 3 * 0.44)
    cost = cost_of("mm", priced(Product("itself"), x))
    assert cost.relayout == pytest.approx(2 * rearranged)


def test_an_input_of_the_host_arrives_as_its_only_reader_wants_it():
    x = torch.ones(32, 64)
    alone, other = (
        cost_of("mm", priced(Product("weight", uses=uses), x, input_origin="host"))
        for uses in (1, 2)
    )
    assert alone.relayout < other.relayout
    assert other.relayout == cost_of("mm", priced(Product("weight"), x)).relayout


class Reader(nn.Module):
    """Two operators that go over the input or over the first one's result."""

    def __init__(self, keeps):
        super().__init__()
        self.keeps = keeps

    def forward(self, x):
        y = x * 2
        return (y + 1, y) if self.keeps else y + 1


def test_an_operator_works_in_place_if_its_operand_dies():
    x = torch.ones(1472, 240)
    for keeps, dies in ((False, True), (True, True), (False, False)):
        pairs = priced(Reader(keeps), x, dies=dies)
        assert cost_of("mul", pairs).in_place == dies
        assert cost_of("add", pairs).in_place == (not keeps)
    assert cost_of("mul", priced(Reader(False), x)).compute < cost_of("mul", pairs).compute


class Loop(nn.Module):
    """A product by a weight in every round."""

    def __init__(self, rounds):
        super().__init__()
        self.weight, self.rounds = nn.Parameter(torch.ones(64, 64)), rounds

    def forward(self, x):
        return ipu_dynamo.for_loop(self.rounds, lambda x: (x @ self.weight).tanh(), [x])[0]


def test_a_loop_costs_its_rounds_and_a_barrier_for_each():
    x = torch.ones(32, 64)
    one, seven = (cost_of("loop", priced(Loop(rounds), x)) for rounds in (2, 7))
    body = sum(cost.cycles for _, cost in one.parts)
    assert one.cycles == pytest.approx(2 * (body + BARRIER))
    assert seven.cycles == pytest.approx(7 * (body + BARRIER))
    weight = cost_of("mm", priced(Product("weight"), x))
    assert cost_of("mm", one.parts).relayout == weight.relayout


class Carried(Loop):
    """A weight that each round changes."""

    def forward(self, x):
        return ipu_dynamo.for_loop(2, lambda w: (x @ w).tanh(), [self.weight])[0]


def test_a_weight_that_a_loop_carries_is_none_in_its_body():
    cost = cost_of("mm", cost_of("loop", priced(Carried(2), torch.ones(64, 64))).parts)
    two = cost_of("mm", priced(Product("itself"), torch.ones(64, 64)))
    assert cost.relayout == two.relayout


class Branch(nn.Module):
    """A cheap body and a dear one."""

    def forward(self, x):
        return ipu_dynamo.cond(
            x.sum() > 0, lambda x: x.exp().log().tanh(), [x], lambda x: x + 1, [x]
        )


def test_a_branch_costs_its_dearer_body():
    cost = cost_of("branch", priced(Branch(), torch.ones(32, 64)))
    names = [operator.operator for operator, _ in cost.parts]
    dearer = sum(part.cycles for operator, part in cost.parts if "add" not in operator.operator)
    assert {"aten.exp.default", "aten.add.Tensor"} <= set(names)
    assert cost.cycles == pytest.approx(dearer)


class Convolutions(nn.Module):
    """Two convolutions of one input, in a group."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.small, self.large = nn.Conv2d(32, 16, 3), nn.Conv2d(32, 64, 3)

    def forward(self, x):
        with ConvolutionGroup(self.plan):
            small, large = self.small(x), self.large(x)
        return small, large


def test_convolutions_side_by_side_share_the_tiles_and_wait_for_the_slowest():
    x = torch.ones(4, 32, 28, 28)
    costs = {
        plan: [
            cost
            for operator, cost in priced(Convolutions(plan), x)
            if "convolution" in operator.operator
        ]
        for plan in ("parallel", "serial")
    }
    parallel, serial = costs["parallel"], costs["serial"]
    assert [cost.flops for cost in parallel] == [cost.flops for cost in serial]
    shares = [cost.cycles / sum(each.cycles for each in parallel) for cost in parallel]
    assert shares == pytest.approx([16 / 80, 64 / 80])
    tiles = 1472 * 64 // 80
    (large,) = (
        cost
        for operator, cost in priced(Convolutions("serial"), x, ipu=replace(BOW, tiles=tiles))
        if "convolution" in operator.operator and operator.results[0].shape[1] == 64
    )
    assert sum(cost.cycles for cost in parallel) >= large.cycles
    assert all(cost.cycles >= cost.bounds.largest for cost in parallel)


def test_products_in_eight_bits_read_operands_of_one_byte():
    model, x = Product("weight").half(), torch.ones(32, 64, dtype=torch.half)
    eight = replace(machines["c600"].ipu, half_products="fp8")
    half, byte = (cost_of("mm", priced(model, x, ipu=ipu)) for ipu in (machines["c600"].ipu, eight))
    assert (half.plan.kind, byte.plan.kind) == ("16.32", "8")
    assert byte.relayout < half.relayout
    with pytest.raises(ValueError, match=r"Bow has no products of kind 8"):
        priced(model, x, ipu=replace(BOW, half_products="fp8"))


@pytest.mark.quick(6)
@given(
    recipe=recipes(random=True, dtypes=[torch.float16, torch.float32]),
    training=st.booleans(),
    name=st.sampled_from(sorted(machines)),
)
def test_the_operators_of_drawn_models_are_no_faster_than_their_bounds(recipe, training, name):
    model = recipe.build()
    made = program(model, recipe.data(1), training=training)
    weights = {variable.name for variable in made.variables}
    for call, operators in machine_operators(made):
        arguments = [
            Argument("weight" if argument in weights else "value", argument not in weights)
            for argument in call.arguments
        ]
        for operator, cost in zip(
            operators,
            price_call(operators, arguments, Resources(machines[name].ipu)),
            strict=True,
        ):
            note(f"{operator.operator} {operator.operands} {cost}")
            assert cost.cycles >= cost.bounds.largest


@pytest.mark.few(2, 3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("training", [False, True])
def test_the_operators_of_known_models_have_formulas(case, training):
    model, batch = case.build()
    capture = trace(model, read_arguments(model, (), batch), training=training)
    made = lower(capture, whole_step(Options(), training=training))
    guesses = {
        operator.operator
        for call, operators in machine_operators(made)
        for operator, cost in zip(
            operators,
            price_call(operators, [Argument()] * len(call.arguments), Resources(BOW)),
            strict=True,
        )
        if not cost.known
    }
    assert guesses <= {"aten.cumsum.default"}
