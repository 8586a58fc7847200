"""Check that sharded variables are gathered and scattered where needed, and change no bit."""

import re
from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_dynamo import (
    Block,
    Location,
    Locations,
    Options,
    ReplicaGroups,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.options import OptionError
from ipu_dynamo.program import (
    AllGather,
    AllReduce,
    Call,
    Copy,
    Load,
    Program,
    ReduceScatter,
    Repeat,
    Store,
    Traffic,
    Update,
)

SHARDED = Location(sharded=True)
AWAY = Location(off_chip=True, sharded=True)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
}


class Tied(nn.Module):
    """Two layers on two IPUs; both read one matrix."""

    def __init__(self, size=3):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(size, size)

    def forward(self, x):
        with Block("a", 0):
            h = torch.tanh(self.layer(x))
        with Block("b", 1):
            return F.mse_loss(h @ self.layer.weight, x)


class Grouped(nn.Module):
    """A matrix of which each of two groups of replicas has its own, and one that all share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Parameter(torch.randn(2, 3, 3))
        self.shared = nn.Parameter(torch.randn(3, 5))

    def forward(self, x):
        y = x @ self.own @ self.shared
        return F.mse_loss(y, torch.ones_like(y))


def train(locations, model=Tied, optimizer="adamw", half=False, **options):
    """A trained program, the losses of three calls, and what is left in model and optimiser."""
    model = model().half() if half else model()
    update = OPTIMIZERS[optimizer](model.parameters())
    settings = {"replicas": 2, "seed": 1, **options}
    step = compile_training(model, update, Options("eager", locations=locations, **settings))
    rows = 2 * settings.get("gradient_accumulation", 1) * settings["replicas"]
    torch.manual_seed(1)
    data = [torch.randn(rows, 3, dtype=torch.float16 if half else None) for _ in range(3)]
    losses = [step(x) for x in data]
    step.read_optimizer_state()
    states = [t for state in update.state.values() for t in state.values()]
    assert step.executable.memory.traffic == step.program.traffic * 3
    assert Program.parse(step.program.text()) == step.program
    return step, [*losses, *(p.detach() for p in model.parameters()), *states]


def assert_same_as_whole(locations, **settings):
    """Train with and without shards; return the program with."""
    step, found = train(locations, **settings)
    _, expected = train(Locations(), **settings)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    return step.program


def word(instruction):
    """The class of an instruction, as the text of programs has it."""
    return re.sub(r"\B(?=[A-Z])", "_", type(instruction).__name__).lower()


def kinds(instructions):
    """What happens, in order: an all_gather or a move with its variable, or else the kind."""
    wanted = Call | Copy | AllGather | Load | AllReduce | ReduceScatter | Store | Update
    return [
        (word(i), i.value) if isinstance(i, AllGather | Load | Store) else word(i)
        for i in instructions
        if isinstance(i, wanted)
    ]


def parts(program):
    """Before, in and after the micro-batches of a step."""
    (step,) = program.body
    at = [type(i) for i in step.body].index(Repeat)
    return step.body[:at], step.body[at].body, step.body[at + 1 :]


@pytest.mark.few(8)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("weights", "states"),
    [(Location(), SHARDED), (SHARDED, Location()), (AWAY, SHARDED)],
    ids=["states", "weights", "both"],
)
def test_shards_change_no_bit(optimizer, weights, states):
    locations = Locations(weights=weights, optimizer_state=states)
    program = assert_same_as_whole(locations, optimizer=optimizer, replicas=3)
    (update,) = (i for i in program.walk() if isinstance(i, Update))
    divided = weights.sharded or (states.sharded and optimizer != "sgd")
    assert bool(update.sharded) == divided


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation": 4, "strategy": Strategy("pipelined")},
        {"gradient_accumulation": 2, "mean_strategy": "running"},
        {"half": True, "stochastic_rounding": True, "loss_scale": 8.0},
        {"device_iterations": 1, "reduction": "sum", "optimizer": "momentum"},
        {"replicas": 8},  # more replicas than a bias has elements
    ],
    ids=str,
)
def test_shards_change_no_bit_in_other_settings(settings):
    locations = Locations(weights=AWAY, optimizer_state=AWAY, accumulators=Location(True))
    assert_same_as_whole(locations, **settings)


def test_states_in_shards_scatter_gradients_and_gather_weights():
    step, _ = train(Locations(optimizer_state=SHARDED), optimizer="momentum")
    before, loop, after = parts(step.program)
    assert "gather" not in str(kinds(before)) + str(kinds(loop))
    assert [i for i in kinds(after) if i != "copy"] == [
        "reduce_scatter",
        "update",
        ("all_gather", "layer.weight"),
        ("all_gather", "layer.bias"),
    ]
    shards = {v.name: v.shards for v in step.program.variables if v.shards > 1}
    assert shards == {"layer.weight..momentum_buffer": 2, "layer.bias..momentum_buffer": 2}


def test_weights_in_shards_are_gathered_for_every_call_and_for_copies():
    locations = Locations(weights=SHARDED, optimizer_state=SHARDED)
    step, _ = train(locations, gradient_accumulation=2)
    before, loop, after = parts(step.program)
    assert kinds(before) == [("all_gather", "layer.weight"), "copy"]
    assert [i for i in kinds(loop) if i != "copy"] == [
        ("all_gather", "layer.weight"),
        ("all_gather", "layer.bias"),
        "call",
        "call",
        "call",
    ]
    assert kinds(after) == ["reduce_scatter", "update"]


def test_whole_states_of_weights_in_shards_are_gathered():
    step, _ = train(Locations(weights=SHARDED), optimizer="momentum")
    *_, after = parts(step.program)
    gathered = [name for kind, name in (i for i in kinds(after) if isinstance(i, tuple))]
    assert gathered == ["layer.weight..momentum_buffer", "layer.bias..momentum_buffer"]


def test_shards_off_the_chip_are_loaded_then_gathered():
    step, _ = train(Locations(weights=AWAY, optimizer_state=AWAY), optimizer="sgd")
    before, loop, after = parts(step.program)
    assert kinds(before) == []
    weight, bias = "layer.weight", "layer.bias"
    both = [("load", weight), ("all_gather", weight), ("load", bias), ("all_gather", bias)]
    assert [i for i in kinds(loop) if i != "copy"] == [
        *both,
        "call",
        *both[:2],
        "call",
        "call",
    ]
    loads = [("load", weight), ("load", bias), "update", ("store", weight), ("store", bias)]
    assert kinds(after) == ["reduce_scatter", *loads]
    moved = {i.value: i for i in step.program.walk() if isinstance(i, Load)}
    assert [str(moved[name]).split("  ")[0] for name in (weight, bias)] == [
        "load shard of %layer.weight: f32[5], 20 bytes",
        "load shard of %layer.bias: f32[2], 8 bytes",
    ]


@pytest.mark.parametrize("replicas", [2, 3, 4, 9])
def test_bytes_are_those_of_padded_shards(replicas):
    step, _ = train(Locations(weights=SHARDED, optimizer_state=SHARDED), replicas=replicas)
    weight, bias = -(-9 // replicas), -(-3 // replicas)
    others = 4 * (replicas - 1) * replicas
    gathered = others * (2 * weight + bias)  # the weight twice: once for the copy to the other IPU
    assert step.program.traffic == Traffic(0, 0, gathered, others * (weight + bias))
    (line,) = (line for line in step.program.short().splitlines() if "between replicas" in line)
    assert f"{gathered} bytes gathered, {others * (weight + bias)} bytes scattered" in line


@pytest.mark.parametrize(("least", "expected"), [(0, 2), (3, 2), (4, 1), (9, 1), (10, 0)])
def test_small_tensors_stay_whole(least, expected):
    step, _ = train(Locations(weights=Location(sharded=True, min_sharded=least)))
    found = [v for v in step.program.variables if v.kind == "parameter" and v.shards > 1]
    assert len(found) == expected
    (update,) = (i for i in step.program.walk() if isinstance(i, Update))
    assert update.sharded == tuple(v.name for v in found)
    assert ("shard of %layer.weight by" in str(update)) == (expected > 0)


def test_nothing_is_divided_for_one_replica():
    step, _ = train(Locations(weights=SHARDED, optimizer_state=SHARDED), replicas=1)
    assert all(v.shards == 1 for v in step.program.variables)
    assert not [i for i in step.program.walk() if isinstance(i, AllGather | ReduceScatter)]


def test_each_group_of_replicas_has_shards_of_its_own():
    groups = {"own": ReplicaGroups(2, orthogonal=True)}
    locations = Locations(weights=SHARDED, optimizer_state=AWAY)
    settings = {"model": Grouped, "replicas": 4, "replica_groups": groups}
    program = assert_same_as_whole(locations, **settings)
    shards = {v.name: (v.shards, v.held.shape) for v in program.variables if v.kind == "parameter"}
    assert shards == {"own": (2, (5,)), "shared": (4, (4,))}
    scatters = [str(i) for i in program.walk() if isinstance(i, ReduceScatter)]
    assert scatters == [
        "reduce_scatter sum over each group of 2 orthogonal replicas (%own..grad: f32[5]), "
        "20 bytes  on ipu0",
        "reduce_scatter sum over replicas (%shared..grad: f32[4]), 48 bytes  on ipu0",
    ]


def test_groups_of_one_replica_have_no_shards():
    groups = {"own": ReplicaGroups(1)}
    settings = {"model": Grouped, "replicas": 2, "replica_groups": groups}
    program = assert_same_as_whole(Locations(weights=SHARDED), **settings)
    assert {v.name for v in program.variables if v.shards > 1} == {"shared"}


def test_each_replica_is_said_to_hold_its_part():
    step, _ = train(Locations(weights=SHARDED, optimizer_state=AWAY))
    lines = {v.name: str(v) for v in step.program.variables}
    assert lines["layer.bias"] == "parameter %layer.bias: f32[3]  on ipu0, in 2 shards of f32[2]"
    assert lines["layer.bias..exp_avg"] == (
        "state %layer.bias..exp_avg: f32[3]  off chip, of ipu0, in 2 shards of f32[2]"
    )
    here = [v for v in step.program.variables if not v.off_chip]
    nbytes = sum(4 * (prod(v.type.shape) if v.shards == 1 else v.held.shape[0]) for v in here)
    assert f"ipu0: {nbytes} B" in step.program.short()


def test_an_inference_gathers_weights_that_stay_in_shards():
    model, x = Tied(), torch.randn(4, 3)
    options = Options("eager", replicas=2, locations=Locations(weights=AWAY))
    run = compile_inference(model, options)
    assert torch.equal(run(x), compile_inference(model, Options("eager", replicas=2))(x))
    assert kinds(run.program.walk()).count(("all_gather", "layer.weight")) == 2
    assert run.executable.memory.traffic == run.program.traffic


def test_checkpoints_hold_whole_tensors():
    """A run in shards goes on from the checkpoint of one without, and the reverse."""
    x = torch.randn(4, 3)
    shards = Locations(weights=SHARDED, optimizer_state=SHARDED)
    results = []
    for first, second in [(Locations(), shards), (shards, Locations())]:
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = compile_training(model, optimizer, Options("eager", replicas=2, locations=first))
        step(x)
        again = Tied()
        again.load_state_dict(model.state_dict())
        fresh = torch.optim.AdamW(again.parameters(), lr=0.5)
        fresh.load_state_dict(optimizer.state_dict())
        step = compile_training(again, fresh, Options("eager", replicas=2, locations=second))
        fresh.param_groups[0]["lr"] = 0.05
        results.append([step(x), step(x), again.layer.weight.detach()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["accumulators", "activations"])
def test_what_differs_between_replicas_is_not_divided(kind):
    with pytest.raises(OptionError, match=f"{kind} in shards"):
        Locations(**{kind: SHARDED})


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [("sharded", 1, "sharded is 1"), ("min_sharded", -1, "min_sharded is -1")],
)
def test_settings_are_checked(field, value, problem):
    with pytest.raises(OptionError, match=problem):
        Location(**{field: value})
