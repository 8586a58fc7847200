"""Check updates that are traced from Python against the optimisers themselves."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from ipu_dynamo import (
    Block,
    CompileError,
    Location,
    Locations,
    Strategy,
    compile_training,
    identity_loss,
    load,
    save,
)
from ipu_dynamo.errors import InputError, UpdateNotTraced
from ipu_dynamo.program import Program, Update, UpdateFactors
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.whole_step.optimizer.optimizer_sync import OptimizerLink
from tests.whole_step.optimizer import written_optimizers as optimizers


class Layers(nn.Module):
    """Two layers, on one IPU or two."""

    def __init__(self, *, ipus: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)
        self.ipus = ipus
        self.to(dtype)

    def forward(self, x):
        with Block("first", ipu_id=0):
            hidden = self.first(x).tanh()
        with Block("second", ipu_id=self.ipus - 1):
            return identity_loss(self.second(hidden).square(), "mean")


PLACES = {
    "one": (1, {}),
    "accumulation": (1, {"gradient_accumulation": 2, "loss_scale": 8.0}),
    "pipeline": (2, {"gradient_accumulation": 4, "strategy": Strategy("pipelined")}),
    "replicas": (1, {"replicas": 2}),
    "several steps": (1, {"device_iterations": 3}),
    "off the chip": (1, {"locations": Locations(optimizer_state=Location(off_chip=True))}),
}


def compare(make, place="one", *, calls=4, schedule=False, rows=4):
    """Train a model here and eagerly; return what both have in the end."""
    ipus, options = PLACES[place]
    steps = options.get("device_iterations", 1)
    model = Layers(ipus=ipus)
    theirs = copy.deepcopy(model)
    ours, reference = make(model), make(theirs)
    run = compile_training(model, ours, {"engine": "eager", **options})
    rates = (
        [optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (ours, reference)] if schedule else ()
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(calls):
        x = torch.randn(rows * steps, 3, generator=generator)
        run(x)
        for part in x.split(rows):
            reference.zero_grad()
            theirs(part).backward()
            reference.step()
        for rate in rates:
            rate.step()
    for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
    check_states(ours.state_dict(), reference.state_dict())
    return run, ours, reference


def check_states(ours, expected):
    assert ours["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert ours["state"][index].keys() == state.keys()
        for name, value in state.items():
            mine = ours["state"][index][name]
            assert type(mine) is type(value)
            if isinstance(value, torch.Tensor):
                assert mine.dtype == value.dtype
                torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)
            else:
                assert mine == value


def groups(kind, **settings):
    """An optimiser with two groups."""

    def make(model):
        first = {"params": model.first.parameters()}
        return kind([first, {"params": model.second.parameters(), "lr": 0.05}], **settings)

    return make


TORCH = [
    (groups(optim.Adagrad, lr_decay=0.1, weight_decay=0.1), "pipeline", False),
    (groups(optim.Adadelta, maximize=True), "accumulation", True),
    (groups(optim.Adamax, lr=0.1), "replicas", True),
    (groups(optim.NAdam, lr=0.1, weight_decay=0.1), "off the chip", False),
    (groups(optim.RAdam, lr=0.1), "several steps", False),  # another variant from step 6 on
    (groups(optim.ASGD, lr=0.1, t0=2), "one", True),  # and from step 3 on
    (groups(optim.Rprop, lr=0.1), "one", False),
    (groups(optim.Adafactor, lr=0.1), "pipeline", False),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("make", "place", "schedule"), TORCH)
def test_torchs_optimizers_are_torchs(make, place, schedule):
    compare(make, place, calls=3, schedule=schedule)


def test_muon_is_torchs():
    def make(model):
        return optim.Muon([model.first.weight, model.second.weight], lr=0.02)

    model, theirs = Layers(), Layers()
    for one in (model, theirs):
        one.first.bias.requires_grad_(False)
    run = compile_training(model, make(model), {"engine": "eager"})
    reference = make(theirs)
    for x in torch.randn(3, 4, 3):
        run(x)
        reference.zero_grad()
        theirs(x).backward()
        reference.step()
    for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-3)  # bfloat16 inside


WRITTEN = [
    (optimizers.Lion, {}, "several steps"),
    (optimizers.Lookahead, {}, "one"),
    (optimizers.CountsInItsGroup, {}, "one"),
    (optimizers.OneNameForThree, {}, "pipeline"),
    (optimizers.TensorsAsRates, {}, "one"),
    (optimizers.Centralized, {}, "pipeline"),
    (optimizers.SkipsByDtype, {}, "one"),
    (optimizers.ScheduledByNumbers, {"warm": 2}, "one"),
    (optimizers.Coupled, {}, "pipeline"),
    (optimizers.ScalesByItsOwnSize, {}, "one"),
    (optimizers.EstimatesItsRate, {}, "pipeline"),
    (optimizers.EstimatesItsRate, {}, "several steps"),
    (optimizers.KeepsLists, {}, "off the chip"),
    (optimizers.StepsInLists, {}, "pipeline"),
    (optimizers.OfSizes, {}, "pipeline"),
    (optimizers.OfSizes, {"rank": 1, "keep": 3}, "several steps"),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "settings", "place"), WRITTEN)
def test_optimizers_of_users_are_traced(kind, settings, place):
    compare(lambda model: kind(model.parameters(), **settings), place, calls=5)


def test_states_are_those_of_every_step_where_a_step_is_traced_anew():
    model = Layers()
    theirs = copy.deepcopy(model)
    ours, reference = (optim.RAdam(m.parameters(), lr=0.1) for m in (model, theirs))
    run = compile_training(model, ours, {"engine": "eager"})
    for x in torch.randn(9, 4, 3):  # another variant from the sixth on
        run(x)
        reference.zero_grad()
        theirs(x).backward()
        reference.step()
        check_states(ours.state_dict(), reference.state_dict())


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["RAdam", "ASGD", "Lookahead"])
def test_a_step_is_traced_anew_without_values_of_states(kind, monkeypatch):
    """A rank has no states of other ranks' IPUs: their values are not read, and any would do."""
    kinds = {
        "RAdam": lambda model: optim.RAdam(model.parameters(), lr=0.1),
        "ASGD": lambda model: optim.ASGD(model.parameters(), lr=0.1, t0=2),
        "Lookahead": lambda model: optimizers.Lookahead(model.parameters(), k=3),
    }
    traces, trace_next, whole = [], OptimizerLink.trace_next, Executable.whole

    def of_counters(executable, name):
        factors = next(i for i in executable.program.walk() if isinstance(i, UpdateFactors))
        assert name in factors.counters
        return whole(executable, name)

    def traced_in_ignorance(link, *arguments):
        counters = link.traced.variants.plan.counters
        for world in link.traced.variants.worlds:
            for leaf in world.leaves:
                if leaf.is_tensor and leaf.parameter is not None and leaf.path not in counters:
                    leaf.value.fill_(torch.nan)
        with monkeypatch.context() as patched:
            patched.setattr(Executable, "whole", of_counters)
            return trace_next(link, *arguments)

    for traced in (trace_next, traced_in_ignorance):
        monkeypatch.setattr(OptimizerLink, "trace_next", traced)
        model = Layers()
        optimizer = kinds[kind](model)
        run = compile_training(model, optimizer, {"engine": "eager"})
        torch.manual_seed(0)
        for x in torch.randn(9, 4, 3):
            run(x)
        run.read_optimizer_state()
        texts = [program.text() for program in run.executable.other_updates]
        traces.append((texts, model.state_dict(), optimizer.state_dict()))
    (known, weights, states), (ignorant, others, other_states) = traces
    assert known == ignorant
    assert known, "no step was traced anew"
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    check_states(states, other_states)


def test_step_hooks_are_traced():
    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    def make(model):
        optimizer = optim.SGD(model.parameters(), 0.5, momentum=0.9)
        optimizer.register_step_pre_hook(halve)
        return optimizer

    compare(make, calls=3)


def test_numbers_that_counters_share_and_numbers_of_groups_come_back():
    _, ours, reference = compare(
        lambda model: optimizers.CountsInItsGroup(model.parameters()), calls=3
    )
    assert ours.param_groups[0]["step"] == reference.param_groups[0]["step"] == 3
    _, ours, _ = compare(lambda model: optimizers.Lookahead(model.parameters()), calls=4)
    assert ours.t == 4


REFUSED = [
    (
        optimizers.DecidesByGradients,
        r"by the values of gradients.*\n.*optimizers\.py:\d+ in step",
    ),
    (optimizers.CountsOutside, "does not do the same twice"),
    (optimizers.DrawsInPython, "draws random numbers in Python"),
    (optimizers.ReadsOutside, r"reads a tensor of shape \[\]"),
    (optimizers.SelectsByMask, "cannot be traced: DynamicOutputShapeException"),
    (optimizers.Wrapper, r"Wrapper has the groups of another optimizer"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSED)
def test_what_would_be_lost_is_refused(kind, message):
    model = Layers()
    before = copy.deepcopy(model.state_dict())
    run = compile_training(model, kind(model.parameters()), {"engine": "eager"})
    with pytest.raises(CompileError, match=message) as info:
        run(torch.ones(2, 3))
    assert info.value.id == "update"
    assert 'update="host"' in str(info.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_state_that_only_later_steps_change_is_refused_at_the_first_of_them():
    model = Layers()
    run = compile_training(
        model, optimizers.ChangesAStateLater(model.parameters()), {"engine": "eager"}
    )
    for _ in range(2):
        run(torch.ones(2, 3))
    with pytest.raises(CompileError, match=r"some steps of the optimizer change .*'norm'"):
        run(torch.ones(2, 3))


def test_an_optimizer_that_was_not_initialised_is_refused():
    model = Layers()
    optimizer = optimizers.NeverInitialised(model.parameters())
    with pytest.raises(CompileError, match=r"NeverInitialised lacks what .* sets") as info:
        compile_training(model, optimizer, {"engine": "eager"})
    assert info.value.id == "update"


def test_differentiable_steps_are_refused():
    model = Layers()
    optimizer = optim.Adamax(model.parameters(), differentiable=True)
    run = compile_training(model, optimizer, {"engine": "eager"})
    with pytest.raises(CompileError, match="parameter group 0 asks for a differentiable step"):
        run(torch.ones(2, 3))


@pytest.mark.parametrize(
    "make", [partial(optim.Adamax, lr=0.1), optimizers.StepsInLists], ids=["Adamax", "lists"]
)
def test_shards_are_updated_alone_or_refused(make):
    options = {
        "engine": "eager",
        "replicas": 2,
        "locations": Locations(optimizer_state=Location(sharded=True)),
    }
    model, theirs = Layers(), Layers()
    run = compile_training(model, make(model.parameters()), options)
    reference = make(theirs.parameters())
    x = torch.randn(4, 3)
    run(x)
    theirs(x).backward()
    reference.step()
    for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
    assert any(i.sharded for i in run.program.walk() if isinstance(i, Update))
    model = Layers()
    run = compile_training(model, optimizers.Centralized(model.parameters()), options)
    with pytest.raises(CompileError, match=r"updates first\.weight as a whole, and locations"):
        run(x)


@pytest.mark.parametrize("rounding", [False, True])
def test_half_weights_are_rounded_once(rounding):
    """Computed in float32: rounded to one of the two halves around, the nearer unless at random."""
    model = Layers(dtype=torch.half)
    exact = copy.deepcopy(model).float()
    options = {"engine": "eager", "stochastic_rounding": rounding, "seed": 1}
    run = compile_training(model, optim.Adamax(model.parameters(), lr=0.1), options)
    reference = optim.Adamax(exact.parameters(), lr=0.1)
    x = torch.randn(4, 3).half()
    gradients = copy.deepcopy(model)
    gradients(x).backward()
    for p, g in zip(exact.parameters(), gradients.parameters(), strict=True):
        p.grad = g.grad.float()
    reference.step()
    run(x)
    for mine, expected in zip(model.parameters(), exact.parameters(), strict=True):
        step = torch.finfo(torch.half).eps * expected.abs().clamp(min=2.0**-14)
        assert ((mine.float() - expected).abs() <= step * (1.01 if rounding else 0.51)).all()


def test_a_state_that_was_saved_goes_on():
    x = torch.randn(6, 4, 3)
    model = Layers()
    first = optim.RAdam(model.parameters(), lr=0.1)
    run = compile_training(model, first, {"engine": "eager"})
    for part in x[:3]:
        run(part)
    saved = copy.deepcopy((model.state_dict(), first.state_dict()))
    for part in x[3:]:
        run(part)
    again, theirs = Layers(), Layers()
    for one in (again, theirs):
        one.load_state_dict(saved[0])
    ours, reference = (optim.RAdam(one.parameters(), lr=0.1) for one in (again, theirs))
    for one in (ours, reference):
        one.load_state_dict(copy.deepcopy(saved[1]))
    other = compile_training(again, ours, {"engine": "eager"})
    for part in x[3:]:
        other(part)
        reference.zero_grad()
        theirs(part).backward()
        reference.step()
    for mine, expected, unbroken in zip(
        again.parameters(), theirs.parameters(), model.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(mine, unbroken)
    first.load_state_dict(saved[1])  # into the program that made it
    model.load_state_dict(saved[0])
    for part in x[3:]:
        run(part)
    for mine, expected in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_what_the_loss_does_not_hang_on_is_left_alone():
    class Part(Layers):
        def forward(self, x):
            return identity_loss(self.first(x).square(), "mean")

    model, theirs = Part(), Part()
    ours, reference = (optim.Adamax(one.parameters(), lr=0.1) for one in (model, theirs))
    run = compile_training(model, ours, {"engine": "eager"})
    for x in torch.randn(2, 4, 3):
        run(x)
        reference.zero_grad()
        theirs.first(x).square().mean().backward()
        reference.step()
    check_states(ours.state_dict(), reference.state_dict())
    ours.load_state_dict(reference.state_dict())
    run(x)
    assert torch.equal(model.second.weight, theirs.second.weight)


def test_programs_with_traced_updates_are_read_back():
    run, _, _ = compare(groups(optim.Adamax, lr=0.1), "pipeline", calls=2)
    program = run.program
    assert program.update_functions
    assert Program.parse(program.text()) == program
    updates = [i for i in program.walk() if isinstance(i, Update)]
    assert all(update.function and "traced @adamax_" in str(update) for update in updates)


@pytest.mark.slow
def test_saved_programs_go_on_as_long_as_their_trace_holds(tmp_path):
    model = Layers()
    run = compile_training(model, optim.RAdam(model.parameters(), lr=0.1), {"engine": "eager"})
    x = torch.randn(8, 4, 3)
    for part in x[:2]:
        run(part)
    save(run, tmp_path / "early")
    loaded = load(tmp_path / "early")
    for part in x[2:5]:
        run(part)
        loaded(part)
    assert torch.equal(loaded.state_dict()["first.weight"], model.first.weight)
    with pytest.raises(UpdateNotTraced, match="a loaded program has no optimizer to trace"):
        loaded(x[5])
    for part in x[5:7]:
        run(part)
    save(run, tmp_path / "late")
    loaded = load(tmp_path / "late")
    run(x[7])
    loaded(x[7])
    assert torch.equal(loaded.state_dict()["first.weight"], model.first.weight)


def test_saved_programs_know_all_variants_that_were_traced(tmp_path):
    model = Layers()
    optimizer = optimizers.Lookahead(model.parameters(), k=3)
    run = compile_training(model, optimizer, {"engine": "eager"})
    x = torch.randn(9, 4, 3)
    run.compile(x[0])
    save(run, tmp_path / "new")  # before the step that makes its states
    for part in x[:4]:
        run(part)
    save(run, tmp_path / "known")
    loaded = load(tmp_path / "known")
    save(loaded, tmp_path / "again")
    again, new = load(tmp_path / "again"), load(tmp_path / "new")
    for part in x[:2]:
        new(part)
    with pytest.raises(UpdateNotTraced, match="a loaded program has no optimizer to trace"):
        new(x[2])
    for part in x[4:]:
        for one in (run, loaded, again):
            one(part)
    for one in (loaded, again):
        assert torch.equal(one.state_dict()["first.weight"], model.first.weight)


def test_another_setting_is_another_program():
    model = Layers()
    optimizer = optim.Adamax(model.parameters(), lr=0.1)
    run = compile_training(model, optimizer, {"engine": "eager"})
    run(torch.ones(2, 3))
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(InputError, match="maximize"):
        run(torch.ones(2, 3))
    optimizer.param_groups[0]["maximize"] = False
    run(torch.ones(2, 3))
    with pytest.raises(InputError, match="has the update of Adamax, not of Adagrad"):
        run.set_optimizer(optim.Adagrad(model.parameters()))


def test_a_whole_number_may_become_another_one():
    model, theirs = Layers(), Layers()
    ours, reference = (optim.Adamax(one.parameters(), weight_decay=0) for one in (model, theirs))
    run = compile_training(model, ours, {"engine": "eager"})
    for x, decay in zip(torch.randn(4, 4, 3), (0, 0.3, 1, 0.2), strict=True):
        for one in (ours, reference):
            one.param_groups[0]["weight_decay"] = decay
        run(x)
        reference.zero_grad()
        theirs(x).backward()
        reference.step()
        for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
    ours.param_groups[0]["weight_decay"] = None
    with pytest.raises(InputError, match="was 0 when it was compiled, and is None"):
        run(x)


def test_numbers_of_users_act_wherever_they_are():
    """A tensor as an attribute, and one as a rate; to write what steps count is refused."""

    def change(optimizer):
        optimizer.decay.fill_(0.5)
        optimizer.param_groups[0]["lr"].fill_(0.2)

    model, theirs = Layers(), Layers()
    ours, reference = (optimizers.TensorsAsRates(one.parameters()) for one in (model, theirs))
    for one in (ours, reference):
        one.param_groups[0]["lr"] = torch.full((), 0.1)
    run = compile_training(model, ours, {"engine": "eager"})
    for x in torch.randn(3, 4, 3):
        run(x)
        reference.zero_grad()
        theirs(x).backward()
        reference.step()
        change(ours)
        change(reference)
    for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
    ours = optimizers.Lookahead(model.parameters())
    run = compile_training(model, ours, {"engine": "eager"})
    run(x)
    ours.state_dict()
    ours.t = 7
    with pytest.raises(InputError, match="which its steps change, was 1 and is 7"):
        run(x)


def test_a_failed_step_counts_nothing():
    model = Layers()
    optimizer = optim.Adamax(model.parameters(), lr=0.1)
    run = compile_training(model, optimizer, {"engine": "eager", "device_iterations": 2})
    x = torch.randn(4, 3)
    run(x)
    with pytest.raises(InputError):
        run(x[:3])
    assert optimizer.state_dict()["state"][0]["step"] == 2
