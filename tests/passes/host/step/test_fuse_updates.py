"""Check that a step fused with an update that was traced is that step: values, states, refusals."""

import copy
import warnings

import pytest
import torch
from torch import nn

from ipu_dynamo import ExecutionError, TracedUpdate, compile_training, identity_loss
from ipu_dynamo.passes.host.step.fusing_costs import fusing_costs, why_not_fused
from tests.whole_step.optimizer.test_function_update import (
    Squares,
    at_random,
    batches,
    check,
    of_another_state,
    pair,
    swapping,
    train,
    update_of,
)
from tests.whole_step.optimizer.test_traced_optimizers import Layers

# The eager engine is forced to fuse: its results show that the fused graph is right.
FUSED = {"force": {"FuseStep": True}, "device_iterations": 3}


def compare(options, calls=3):
    """Train by a function of everything, with rates that change; one batch is not finite."""
    run, model, ours, theirs, reference = pair(options)
    for x in batches(calls, 12):
        run(x)
        for rows in x.split(4):
            train(theirs, reference, rows)
        for one in (ours, reference):
            one.param_groups[0]["lr"] *= 0.5
    assert run.executable.fused
    run.read_optimizer_state()
    check(model, ours, theirs, reference)
    return run


@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
def test_trains_as_its_function_in_python(loss_scale):
    run = compare({**FUSED, "loss_scale": loss_scale})
    assert run.functions_compiled == 1  # a rate that changes is no other function


@pytest.mark.inductor
def test_trains_as_its_function_when_compiled():
    run = compare({**FUSED, "engine": "inductor"}, calls=2)
    assert run.functions_compiled == 1  # and none of the update apart


@pytest.mark.few(3)
@pytest.mark.parametrize("apply", [swapping, of_another_state, *map(at_random, range(4))])
def test_parameters_take_values_of_each_other(apply):
    model = Squares().double()
    theirs = copy.deepcopy(model)
    ours, reference = update_of(model, apply), update_of(theirs, apply)
    reference.use_parameters_of(theirs)
    run = compile_training(model, ours, {"engine": "eager", **FUSED})
    x = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    run(x)
    assert run.executable.fused
    run.read_optimizer_state()
    for rows in x.split(4):
        train(theirs, reference, rows)
    check(model, ours, theirs, reference)


class Turned(nn.Module):
    """Weights whose memory lies in another order than their elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x):
        hidden = self.conv(x).flatten(2).mean(2)
        return identity_loss((hidden @ self.matrix).square(), "mean")


@pytest.mark.inductor
def test_weights_keep_their_layout():
    model = Turned()
    theirs = copy.deepcopy(model)
    ours, reference = update_of(model), update_of(theirs)
    reference.use_parameters_of(theirs)
    run = compile_training(model, ours, {**FUSED, "engine": "inductor"})
    x = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(1))
    run(x)
    for rows in x.split(2):
        train(theirs, reference, rows)
    run.read_optimizer_state()
    check(model, ours, theirs, reference)


class Lookup(nn.Module):
    """Fails on a row that the table has not got."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, 3)

    def forward(self, rows):
        return identity_loss(self.table(rows).square(), "mean")


def test_a_failing_step_leaves_what_the_last_complete_one_made():
    model = Lookup()
    theirs = copy.deepcopy(model)
    ours, reference = update_of(model), update_of(theirs)
    reference.use_parameters_of(theirs)
    run = compile_training(model, ours, {"engine": "eager", **FUSED})
    good = torch.tensor([0, 1, 2])
    with pytest.raises(ExecutionError):
        run(torch.cat([good, good + 1, good + 2]))
    for rows in (good, good + 1):
        train(theirs, reference, rows)
    run.read_optimizer_state()
    check(model, ours, theirs, reference)


def by_power(gradients, weights, states, numbers):
    return {n: weights[n] - g.abs() ** numbers["power"] for n, g in gradients.items()}, {}


class Deciding(torch.optim.Optimizer):
    """Decides in Python by its number."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "unread": 2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and group["lr"] > 0.01:
                    parameter.sub_(parameter.grad * group["lr"])


@pytest.mark.parametrize(
    ("make", "dtype", "options", "reason"),
    [
        (lambda m: TracedUpdate({}, by_power, {"power": 2}), torch.float32, {}, "a whole number"),
        (lambda m: Deciding(m.parameters()), torch.float32, {}, "some values of its numbers"),
        (update_of, torch.bfloat16, {}, "not all weights and states are float32"),
        (update_of, torch.float32, {"loss_scale_is_variable": True}, "divided by a loss scale"),
        (update_of, torch.float32, {}, None),
    ],
    ids=["a whole number", "decides", "halves", "loss scale", "none of them"],
)
def test_other_updates_stay_apart(make, dtype, options, reason):
    model = Layers(dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = compile_training(model, make(model), {"engine": "eager", **options})
        run.compile(torch.zeros(4, 3, dtype=dtype))
    why = why_not_fused(run.parts.compiled.written.inlined)
    assert why is None if reason is None else reason in why


def test_each_function_of_the_update_counts_in_what_is_gained():
    run, *_ = pair({})
    run.compile(torch.zeros(4, 3))
    program = run.parts.compiled.written.inlined
    gained = fusing_costs(program).gained
    # three parameters, in parts and pieces, what is computed together, and numbers
    assert gained > 7e-5


class Signs(torch.optim.Optimizer):
    """It looks at a gradient as a vector."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.flatten().sign().view(p.shape) * group["lr"])


@pytest.mark.parametrize("frozen", [True, False])
def test_a_group_may_have_nothing_to_train_and_gradients_any_layout(frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2)).double()
    model[0].requires_grad_(not frozen)
    plain = copy.deepcopy(model)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return identity_loss(self.model(x).square(), "mean")

    def optimizer(of):
        return Signs([{"params": of[0].parameters(), "lr": 0.01}, {"params": of[2].parameters()}])

    x = torch.randn(6, 2, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    theirs = optimizer(plain)
    for one in x.split(2):
        theirs.zero_grad()
        plain(one).square().mean().backward()
        theirs.step()
    options = {"engine": "eager", "device_iterations": 3}
    run = compile_training(Loss(), optimizer(model), options)
    run(x)
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))
