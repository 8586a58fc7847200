"""Check where variables live, and what is loaded and stored around their use."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_dynamo import (
    Block,
    Location,
    Locations,
    Options,
    StageSpec,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.options import OptionError
from ipu_dynamo.program import Call, Copy, Load, Repeat, Store, Update

AWAY = Location(off_chip=True)


class Two(nn.Module):
    """A weight that two IPUs read, and a bias that one of them reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        with Block("a", 0):
            h = torch.tanh(self.layer(x))
        with Block("b", 1):
            return F.mse_loss(h @ self.layer.weight, x)


def body(locations, **options):
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = compile_training(model, optimizer, Options("eager", locations=locations, **options))
    step.compile(torch.ones(4, 3))
    return step.program


def shape(instructions):
    """What happens, in order: a move with its variable and IPU, or the kind of instruction."""
    return [
        (type(i).__name__.lower(), i.value, i.ipu)
        if isinstance(i, Load | Store)
        else type(i).__name__.lower()
        for i in instructions
        if isinstance(i, Load | Store | Call | Update | Copy)
    ]


def test_by_default_nothing_moves():
    program = body(Locations())
    assert not any(v.off_chip for v in program.variables)
    assert not [i for i in program.walk() if isinstance(i, Load | Store)]


def test_every_call_loads_the_weights_that_it_reads_on_its_own_ipu():
    program = body(Locations(weights=AWAY), gradient_accumulation=2)
    (loop,) = (i for i in program.walk() if isinstance(i, Repeat) and i.over == "micro_batch")
    assert shape(i for i in loop.body if not isinstance(i, Copy)) == [
        ("load", "layer.weight", 0),
        ("load", "layer.bias", 0),
        "call",
        ("load", "layer.weight", 1),
        "call",
        "call",
    ]


def test_an_update_loads_what_it_changes_and_stores_it():
    program = body(Locations(weights=AWAY, optimizer_state=AWAY))
    (step,) = program.body
    after = list(step.body)[1 + [type(i) for i in step.body].index(Repeat) :]
    states = ["layer.weight..momentum_buffer", "layer.bias..momentum_buffer"]
    moved = ["layer.weight", "layer.bias", *states, ".group0.ipu0.momentum_started"]
    assert shape(i for i in after if not isinstance(i, Copy)) == [
        *(("load", name, 0) for name in moved),
        "update",
        *(("store", name, 0) for name in moved),
    ]


def test_a_step_loads_its_accumulators_once_and_stores_them():
    program = body(Locations(accumulators=AWAY), gradient_accumulation=2)
    (step,) = program.body
    names = [v.name for v in program.variables if v.kind == "accumulator"]
    moves = [i for i in step.body if isinstance(i, Load | Store)]
    assert moves == [i for i in program.walk() if isinstance(i, Load | Store)]
    loads = [i.value for i in moves if isinstance(i, Load)]
    stores = [i.value for i in moves if isinstance(i, Store)]
    assert loads == stores == names
    kinds = [type(i) for i in step.body]
    assert max(i for i, kind in enumerate(kinds) if kind is Load) < kinds.index(Repeat)
    assert kinds.index(Update) < kinds.index(Store)


@pytest.mark.parametrize(("least", "expected"), [(0, 2), (3, 2), (4, 1), (9, 1), (10, 0)])
def test_tensors_of_fewer_elements_stay(least, expected):
    program = body(Locations(weights=Location(True, least)))
    assert sum(v.off_chip for v in program.variables) == expected


@pytest.mark.parametrize(
    ("location", "moves"), [(AWAY, 2), (Location(), 0), (Location(True, 5), 1)]
)
def test_activations_move_where_liveness_and_location_agree(location, moves):
    def forward(x):
        with Block("a"):
            h = torch.sin(x)  # 6 elements
            small = h.sum(0)  # 3
        with Block("b"):
            return h.sum() + small.sum()

    phases = ((StageSpec(("a",), 0),), (StageSpec(("b",), 0),))
    strategy = Strategy("serial_phased", phases=phases, liveness="off_chip_after_each_phase")
    options = Options("eager", strategy=strategy, locations=Locations(activations=location))
    run = compile_inference(forward, options)
    x = torch.randn(2, 3)
    torch.testing.assert_close(run(x), forward(x))
    assert sum(isinstance(i, Load) for i in run.program.walk()) == moves
    assert sum(isinstance(i, Store) for i in run.program.walk()) == moves


def test_a_parameter_that_forward_changes_stays_on_the_chip():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = nn.Parameter(torch.zeros(2), requires_grad=False)

        def forward(self, x):
            self.count.add_(1)
            return x + self.count

    run = compile_inference(Counting(), Options("eager", 2, locations=Locations(weights=AWAY)))
    assert run(torch.zeros(4, 2)).tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]
    assert not any(v.off_chip for v in run.program.variables)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((1,), "location off_chip is 1; it is True or False"),
        ((True, -1), "location min_elements is -1; it counts from 0"),
        ((True, 1.5), "location min_elements is 1.5"),
    ],
)
def test_a_location_that_cannot_be_is_refused(arguments, problem):
    with pytest.raises(OptionError, match=problem):
        Location(*arguments)


def test_the_short_form_counts_what_is_off_the_chip():
    lines = body(Locations(weights=AWAY)).short().splitlines()
    assert "  off chip: 48 B in 2 variables (2 parameters)" in lines
    assert "  streaming memory: 48 bytes stored, 132 bytes loaded in a call" in lines
