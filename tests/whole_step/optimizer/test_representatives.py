"""Check that few parameters are traced for many, and only where they stand for them."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ipu_dynamo import compile_training, identity_loss
from ipu_dynamo.capture.private.operator_log import NotSeparableError, OperatorLog
from ipu_dynamo.capture.update import record_update
from ipu_dynamo.capture.update.representatives import reduced, representatives
from ipu_dynamo.capture.update.world import world_of
from ipu_dynamo.whole_step.optimizer.traced_optimizer import TracedOptimizer

SHAPES = ((4, 3), (3,), (4, 3), (4, 3), (3,))
X = torch.linspace(-1, 1, 12)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in SHAPES)

    def forward(self, x):
        products = [(w.square() * x[: w.numel()].view_as(w)).sum() for w in self.weights]
        return identity_loss(torch.stack(products), "sum")


class Written(Optimizer):
    """Subtracts gradients; `rate` says at what rate."""

    def __init__(self, params, lr=0.1, other=0.1):
        super().__init__(params, {"lr": lr, "other": other})

    def rate(self, group, index):
        return group["lr"]

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                self.update(p, p.grad, self.rate(group, index))

    def update(self, p, gradient, rate):
        p.add_(gradient, alpha=-rate)


class ByIndex(Written):
    """The fourth parameter moves twice as fast."""

    def rate(self, group, index):
        return group["lr"] * (2 if index == 3 else 1)


class ByCount(Written):
    """Many parameters move slowly."""

    def rate(self, group, index):
        return group["lr"] / len(group["params"])


class OtherNumber(Written):
    """The fourth parameter takes another number, which may be equal."""

    def rate(self, group, index):
        return group["other" if index == 3 else "lr"]


class Chained(Written):
    """Each parameter takes the gradient of the one before it, too."""

    def step(self):
        self.before = torch.zeros(())
        super().step()
        del self.before

    def update(self, p, gradient, rate):
        p.add_(gradient + self.before, alpha=-rate)
        self.before = gradient.sum()


class Swapped(Written):
    """Each parameter takes the gradient of the next one of its shape."""

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for p in group["params"]:
            alike = [other for other in group["params"] if other.shape == p.shape]
            place = next(i for i, other in enumerate(alike) if other is p)
            self.update(p, alike[(place + 1) % len(alike)].grad, group["lr"])


class Noisy(Written):
    """Adds random numbers."""

    def update(self, p, gradient, rate):
        p.add_(torch.rand_like(gradient), alpha=-rate)


class Counting(Written):
    """The group counts parameters."""

    def update(self, p, gradient, rate):
        for group in self.param_groups:
            group["updated"] = group.get("updated", 0) + 1
        super().update(p, gradient, rate)


def _world(make):
    model = Weights()
    names = {id(p): name for name, p in model.named_parameters()}
    return world_of(make(model.parameters()), names)


def test_one_of_each_shape_is_traced():
    world = _world(Written)
    assert representatives([world]) == (0, 1, 0, 0, 1)
    small = reduced(world, (0, 1, 0, 0, 1))
    assert small.names == ("weights.0", "weights.1")
    assert len(world.parameters) == len(SHAPES)


def test_groups_and_states_tell_parameters_apart():
    model = Weights()
    names = {id(p): name for name, p in model.named_parameters()}
    weights = list(model.parameters())
    groups = [{"params": weights[:3]}, {"params": weights[3:], "lr": 0.2}]
    assert representatives([world_of(Written(groups), names)]) == (0, 1, 0, 3, 4)
    optimizer = torch.optim.Adamax(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert representatives([world_of(optimizer, names)]) == (0, 1, 0, 0, 1)
    optimizer.state[weights[3]]["step"] += 1
    assert representatives([world_of(optimizer, names)]) == (0, 1, 0, 3, 1)


@pytest.mark.parametrize("kind", [ByIndex, ByCount, OtherNumber, Chained, Swapped, Noisy, Counting])
def test_what_differs_is_traced_for_all(kind):
    assert representatives([_world(kind)]) == tuple(range(len(SHAPES)))


@pytest.mark.parametrize("kind", [ByIndex, ByCount, OtherNumber, Chained, Swapped])
def test_and_trains_as_it_does(kind):
    model = Weights()
    plain = copy.deepcopy(model)
    run = compile_training(model, kind(model.parameters()), {"engine": "eager"})
    optimizer = kind(plain.parameters())
    for _ in range(2):
        run(X)
        optimizer.zero_grad()
        plain(X).backward()
        optimizer.step()
    for weight, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, other)


KINDS = {
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01, weight_decay=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "Rprop": torch.optim.Rprop,
    "Written": Written,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_that_of_all_traced(name, monkeypatch):
    """Seven steps of RAdam, which decides anew at the sixth."""
    steps, weights, trace_next = [], [], TracedOptimizer.trace_next

    def noted(*arguments):
        steps[-1].append(trace_next(*arguments))
        return steps[-1][-1]

    monkeypatch.setattr(TracedOptimizer, "trace_next", noted)
    for every in (False, True):
        if every:
            monkeypatch.setattr(
                record_update, "representatives", lambda worlds: tuple(range(len(SHAPES)))
            )
        model = Weights()
        optimizer = KINDS[name](model.parameters())
        run = compile_training(model, optimizer, {"engine": "eager"})
        steps.append([])
        for _ in range(7 if name == "RAdam" else 3):
            run(X)
        run.read_optimizer_state()
        steps[-1] += run._link.traced.steps
        weights.append([*model.parameters(), *_tensors(optimizer)])
    assert all(map(torch.equal, *weights))
    few, many = steps
    assert len(few) == len(many)
    for ours, theirs in zip(few, many, strict=True):
        assert ours.functions == theirs.functions
        assert ours.states == theirs.states
        assert ours.counters == theirs.counters
        assert len(ours.pieces) <= len(theirs.pieces) == len({*SHAPES})


def _tensors(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]


def test_no_operator_takes_tensors_of_two():
    tensors = [torch.empty(2, device="meta") for _ in range(2)]
    with OperatorLog([(tensor, owner, "weight") for owner, tensor in enumerate(tensors)]) as log:
        tensors[0].mul_(torch.full((), 2.0))
        with pytest.raises(NotSeparableError):
            tensors[0].add_(tensors[1])
    assert [len(log.lines[owner]) for owner in range(2)] == [1, 0]
