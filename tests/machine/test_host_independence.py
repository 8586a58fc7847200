"""Check that predictions are of the program alone, and not of how this computer runs it."""

from dataclasses import replace
from itertools import product
from operator import getitem

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from torch import fx, nn

import ipu_dynamo
from ipu_dynamo import Block, Options, Strategy
from ipu_dynamo.machine.call_costs import Argument, price_call
from ipu_dynamo.machine.cost import Resources
from ipu_dynamo.machine.predict_program import predict_program
from ipu_dynamo.machine.system import machines
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.program import Program
from ipu_dynamo.program.machine_operators import MachineGraph
from ipu_dynamo.testing import recipes
from tests.program.test_machine_operators import EMULATIONS, HALF_KINDS, program
from tests.properties.running import draw_placement

ROWS, TOKENS, WIDTH = 2, 8, 16


def needed(program):
    """The cycles of each IPU of a program, and its bytes in each category."""
    prediction = predict_program(program, "bow")
    memory = [ipu.memory for ipu in prediction.ipus]
    return (
        [ipu.cycles for ipu in prediction.ipus],
        prediction.cycles,
        [None if one is None else (one.categories, one.profile, one.total) for one in memory],
    )


class Attention(nn.Module):
    """Attention written out, with dropout and a norm."""

    def __init__(self):
        super().__init__()
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        shares = F.dropout(F.softmax(q @ k.transpose(-1, -2), -1), 0.1)
        return x + F.dropout(shares @ v, 0.1)


class Convolved(nn.Module):
    """Convolutions with a batch norm, over tokens and channels."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return F.relu(self.norm(self.convolution(x.transpose(1, 2)))).transpose(1, 2)


class Looped(nn.Module):
    """A loop that draws random numbers in its body."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x).float()  # a loop of halves rounds to the nearest only
        return ipu_dynamo.for_loop(3, lambda c: F.dropout(c, 0.5).tanh(), [x])[0].half()


class Stack(nn.Module):
    """Equal layers of a kind, dealt over IPUs."""

    def __init__(self, layer, ipus):
        super().__init__()
        self.layers, self.ipus = nn.ModuleList(layer() for _ in range(4)), ipus
        self.half()

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            ipu = number * self.ipus // len(self.layers)
            with Block(f"ipu{ipu}", ipu):
                x = layer(x)
                total = x.float().sum()
        return total


@pytest.mark.parametrize(
    ("partials", "ipus", "layer"),
    [
        ("float", 1, Convolved),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(("half", "float"), (1, 2), (Attention, Convolved, Looped))
        ),
    ],
)
def test_emulation_changes_no_cycle_and_no_byte(layer, ipus, partials):
    options = Options(
        strategy=Strategy(kind="pipelined" if ipus > 1 else "sharded"),
        gradient_accumulation=4,
        partials=partials,
        convolution_partials=partials,
        recompute="off",
        outline=False,
    )
    x = torch.ones(ROWS, TOKENS, WIDTH, dtype=torch.float16)
    plain = needed(program(Stack(layer, ipus), (x,), options, training=True, loss=0))
    for emulation in (
        {"stochastic_rounding": True},
        {"floating_point_exceptions": True},
        {"outline": True},
        {"outline": "auto"},
        {"without": ("UpcastHalfMatmuls",)},
    ):
        changed = replace(options, **emulation)
        made = program(Stack(layer, ipus), (x,), changed, training=True, loss=0)
        assert needed(made) == plain
        assert needed(Program.parse(made.text())) == plain


@pytest.mark.quick(8)
@given(
    recipe=recipes(random=True, kinds=HALF_KINDS, dtypes=[torch.float16]),
    training=st.booleans(),
    partials=st.sampled_from(["half", "float"]),
    emulation=EMULATIONS,
    data=st.data(),
)
def test_emulation_of_drawn_models_changes_nothing(recipe, training, partials, emulation, data):
    model, placement = recipe.build(), draw_placement(data, recipe)
    placement.place(model)
    count = placement.micro_batches(training=training)
    options = Options(
        strategy=placement.strategy,
        gradient_accumulation=count,
        device_iterations=count,
        partials=partials,
        convolution_partials=partials,
        recompute="off",
        outline=False,
    )
    plain = program(model, recipe.data(1), options, training=training)
    other = program(model, recipe.data(1), replace(options, **emulation), training=training)
    note(str(plain))
    note(str(other))
    assert needed(other) == needed(plain)
    assert needed(Program.parse(other.text())) == needed(plain)


def price_of(target, *operands, more=(), results=1):
    """The price of a node made by hand.

    Args:
        operands: tensors on the meta device.
        more: arguments behind them.
        results: how many it has; the first has the type of the first operand.
    """
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{place}") for place in range(len(operands))]
    for node, operand in zip(nodes, operands, strict=True):
        node.meta["val"] = operand
    call = graph.call_function(target, (*nodes, *more))
    made = torch.empty_like(operands[0], memory_format=torch.contiguous_format)
    call.meta["val"] = made if results == 1 else (made, *[made.new_empty(0)] * (results - 1))
    part = call if results == 1 else graph.call_function(getitem, (call, 0))
    part.meta["val"] = made
    graph.output((part,))
    operators = MachineGraph(fx.GraphModule({}, graph)).listed("forward")
    arguments = [Argument()] * len(operands)
    (cost,) = price_call(operators, arguments, Resources(machines["bow"].ipu))
    return cost


def test_attention_of_all_devices_costs_the_same():
    qkv = [torch.empty(ROWS, 4, TOKENS, WIDTH, dtype=torch.float16, device="meta")] * 3
    cpu = price_of(aten._scaled_dot_product_flash_attention_for_cpu.default, *qkv, results=2)
    flash = price_of(aten._scaled_dot_product_flash_attention.default, *qkv, results=9)
    efficient = price_of(
        aten._scaled_dot_product_efficient_attention.default, *qkv, more=(None, False), results=4
    )
    assert cpu.known
    assert cpu.flops == 4 * ROWS * 4 * TOKENS * TOKENS * WIDTH
    assert (cpu.cycles, cpu.bounds) == (flash.cycles, flash.bounds)
    assert (cpu.cycles, cpu.bounds) == (efficient.cycles, efficient.bounds)


def test_a_price_depends_on_no_stride():
    square = torch.empty(64, 64, dtype=torch.float16, device="meta")
    rows, columns = (price_of(aten.mm.default, x, x.clone()) for x in (square, square.t()))
    assert rows == columns
