"""Check that what was made for some hyperparameters is kept whole, and found again."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from ipu_dynamo import Options, compile_training
from ipu_dynamo.errors import IpuError
from ipu_dynamo.runtime.execute.specialisations import Specialisations
from ipu_dynamo.runtime.execute.transaction.update_runs import UpdateRuns
from ipu_dynamo.whole_step.optimizer import traced_optimizer
from tests.runtime.execute.faults import Interrupt, Tracer, traced

HERE = ("/runtime/execute/specialisations.py",)
MAKING = ("/runtime/execute/fused_step.py", *HERE)


@dataclass
class Parity:
    """Fits hyperparameters whose first one leaves this remainder of a division by ten."""

    rest: int

    def fits(self, hyperparameters) -> bool:
        return hyperparameters[0][0] % 10 == self.rest


class Maker:
    """Makes specialisations, and notes what for."""

    def __init__(self):
        self.made = []

    def __call__(self, hyperparameters):
        self.made.append(hyperparameters[0][0])
        return Parity(self.made[-1] % 10)


def test_one_is_made_when_a_step_needs_it_and_found_again():
    make = Maker()
    some = Specialisations(make, [Parity(0)])
    assert some.current is some.choose([[10]])
    for number in (3, 13, 20, 3, 4):
        chosen = some.choose([[number]])
        assert chosen.rest == number % 10
        assert some.current is chosen
    assert make.made == [3, 4]
    assert [one.rest for one in some.all] == [0, 3, 4]


def test_the_oldest_is_dropped_and_made_again():
    make = Maker()
    some = Specialisations(make, most=3)
    for number in (1, 2, 3, 4, 2, 1):
        assert some.choose([[number]]).rest == number
    assert [one.rest for one in some.all] == [3, 4, 1]
    assert make.made == [1, 2, 3, 4, 1]
    unbounded = Specialisations(Maker())
    for number in range(10):
        unbounded.choose([[number]])
    assert len(unbounded.all) == 10


def test_what_does_not_fit_its_hyperparameters_is_refused_and_not_kept():
    some = Specialisations(lambda hyperparameters: Parity(7), [Parity(0)])
    with pytest.raises(IpuError, match="does not fit"):
        some.choose([[1]])
    assert [one.rest for one in some.all] == [some.current.rest] == [0]


def test_an_interrupt_at_any_line_leaves_whole_ones():
    numbers = (5, 6, 15, 1)

    def choose_all(some):
        for number in numbers:
            some.choose([[number]])

    some = Specialisations(Maker(), [Parity(1)], most=3)
    with traced(tracer := Tracer(folders=HERE)):
        choose_all(some)
    lines = [(line, time + 1) for line, most in tracer.reached.items() for time in range(most)]
    assert len(lines) > 20
    for line, time in lines:
        some = Specialisations(Maker(), [Parity(1)], most=3)
        with traced(Tracer(line, time, folders=HERE)), pytest.raises(Interrupt):
            choose_all(some)
        assert some.current in some.all
        assert len(some.all) == len({one.rest for one in some.all}) <= 3
        for number in numbers:
            assert some.choose([[number]]).rest == number % 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return F.mse_loss(self.layer(x), x[:, :2])


class Pair:
    """A compiled step, and the same step of torch."""

    def __init__(self, kind: Callable, **options: object) -> None:
        self.models = ours, theirs = Net(), Net()
        self.optimizers = [kind(model.parameters()) for model in self.models]
        self.run = compile_training(ours, self.optimizers[0], Options("eager", **options))
        self.x = torch.randn(4, 3)
        self.theirs = theirs

    def set(self, **numbers: float) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0] |= numbers

    def check_step(self) -> None:
        self.run(self.x)
        self.optimizers[1].zero_grad()
        self.theirs(self.x).backward()
        self.optimizers[1].step()
        states = [model.state_dict() for model in self.models]
        torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)


def test_an_interrupted_fused_function_is_made_anew_and_no_other_runs_for_it():
    """The hyperparameters of before run the function of before."""
    pair = Pair(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), force={"FuseStep": True})
    usual = {"weight_decay": 0.1, "momentum": 0.9}
    pair.set(**usual)
    pair.check_step()
    functions = pair.run.executable.fused.functions
    with traced(tracer := Tracer(folders=MAKING)):
        functions._make([[0.1, 0.9, 0.0, 0.0]])
    lines = [*tracer.reached]
    for line in lines[:: len(lines) // 8]:
        before = functions.all
        pair.set(weight_decay=0.0)
        with traced(tracer := Tracer(line, 1, folders=MAKING)), pytest.raises(Interrupt):
            pair.run(pair.x)
        assert functions.all == before
        pair.set(**usual)
        pair.check_step()
    pair.set(weight_decay=0.0)
    pair.check_step()
    assert len(functions.all) == 2


def test_so_many_fused_functions_are_kept():
    pair = Pair(
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
        force={"FuseStep": True},
    )
    pair.check_step()
    executable = pair.run.executable
    executable.fused.functions._most = 2
    for numbers in ({"weight_decay": 0.0}, {"dampening": 0.0}, {"weight_decay": 0.1}):
        pair.set(**numbers)
        pair.check_step()
    zeros = [{name for _, name in f.fused.zeros} for f in executable.fused.functions.all]
    assert zeros == [{"weight_decay", "dampening"}, {"dampening"}]


class Limited(optim.Optimizer):
    """Limits the step's size, from a rate of one half on, and less from one on."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                step = group["lr"] * p.grad
                if group["lr"] >= 1:
                    step = step.clamp(-0.2, 0.2)
                elif group["lr"] >= 0.5:
                    step = step.clamp(-0.1, 0.1)
                p.sub_(step)


def test_interrupted_variants_of_a_traced_step_leave_nothing(monkeypatch):
    """No more than two may be traced."""
    monkeypatch.setattr(traced_optimizer, "_MOST", 2)
    pair = Pair(Limited)
    pair.check_step()
    executable = pair.run.executable
    runs, compile_, waiting = executable._looped._runs, UpdateRuns.compile, []

    def interrupted(self, recipes=()):
        waiting.append([*self._waiting])
        raise KeyboardInterrupt

    monkeypatch.setattr(UpdateRuns, "compile", interrupted)
    for rate in (0.5, 1.0):
        pair.set(lr=rate)
        with pytest.raises(KeyboardInterrupt):
            pair.run(pair.x)
        assert executable.other_updates == ()
    first, second = waiting
    assert len(first) == len(second) > 0
    assert not {*first, *second} & {*runs._runs}
    monkeypatch.setattr(UpdateRuns, "compile", compile_)
    for rate in (1.0, 0.1, 1.5):
        pair.set(lr=rate)
        pair.check_step()
    assert len(executable.other_updates) == 1
