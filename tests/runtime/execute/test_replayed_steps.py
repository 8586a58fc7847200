"""Check that a step which is repeated without Python is the step: values, failures, signals."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import ExecutionError, Options, compile_training
from ipu_dynamo.runtime.engines.replay.replay import Repetition, Replay
from ipu_dynamo.runtime.execute import replayed_step
from ipu_dynamo.runtime.execute.timeline import Timeline
from ipu_dynamo.testing import assert_same_bits

pytestmark = pytest.mark.inductor
ROWS = 6


class Net(nn.Module):
    """An embedding, layers, running statistics, and what every row gives."""

    def __init__(self, widths=(5, 19), dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        first, second = widths
        self.table = nn.Embedding(7, first)
        self.layers = nn.Sequential(
            nn.Linear(first, second, bias=False),
            nn.BatchNorm1d(second),
            nn.ReLU(),
            nn.Linear(second, 4),
        )

    def forward(self, rows, y):
        logits = self.layers(self.table(rows))
        return F.cross_entropy(logits, y), logits.detach()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def data(steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(7, (ROWS * steps,), generator=generator)
    return rows, torch.randint(4, (ROWS * steps,), generator=generator)


def compiled(model, name, steps, **options):
    step = compile_training(
        model,
        OPTIMIZERS[name](model.parameters()),
        Options("inductor", device_iterations=steps, **{"output_mode": "all"} | options),
    )
    step.compile(*data(steps))
    return step


def repeats(step):
    return isinstance(step.executable.fused.now.replay, Replay)


def train(model, optimizer, rows, y):
    losses = []
    for some, wanted in zip(rows.split(ROWS), y.split(ROWS), strict=True):
        optimizer.zero_grad()
        loss, each = model(some, wanted)
        loss.backward()
        optimizer.step()
        losses.append((loss.detach(), each.detach()))
    return torch.stack([loss for loss, _ in losses]), torch.cat([each for _, each in losses])


@pytest.mark.examples(10)
@pytest.mark.quick(1)
@given(
    name=st.sampled_from([*OPTIMIZERS]), widths=st.tuples(st.integers(2, 40), st.integers(2, 40))
)
@example(name="adamw", widths=(5, 19))
def test_trains_as_torch(name, widths):
    model = Net(widths)
    expected = copy.deepcopy(model)
    step = compiled(model, name, 3)
    assert repeats(step), step.executable.fused.now.replay
    optimizer = OPTIMIZERS[name](expected.parameters())
    for call in range(2):
        made, losses = step(*data(3, call)), train(expected, optimizer, *data(3, call))
        torch.testing.assert_close(tuple(made), losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


def test_repeated_steps_are_those_that_python_calls():
    models = Net(), Net()
    ours, theirs = (
        compiled(model, "momentum", 4, force=force)
        for model, force in zip(models, ({}, {"ReplaySteps": False}), strict=True)
    )
    assert (repeats(ours), repeats(theirs)) == (True, False)
    for call in range(2):
        made, expected = ours(*data(4, call)), theirs(*data(4, call))
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    states = [model.state_dict() for model in models]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("output_mode", ["all", "final", "every", "sum"])
def test_steps_of_a_call_are_calls_of_a_step_also_while_they_are_watched(output_mode):
    steps, results = [], []
    for count in (1, 4, 5):  # an odd and an even number end in other memory
        model = Net()
        period = {"return_period": 2} if output_mode == "every" and count == 4 else {}
        mode = output_mode if period or output_mode != "every" else "final"
        step = compiled(model, "momentum", count, output_mode=mode, **period)
        assert repeats(step)
        assert step.executable.fused.now.replay.in_place  # from the second step of a call on
        rows, y = data(20)
        if count == 5:
            step.executable.timeline = Timeline()
        parts = zip(rows.split(ROWS * count), y.split(ROWS * count), strict=True)
        results.append([step(*part) for part in parts])
        steps.append(model.state_dict())
        if count == 5:
            assert len(step.executable.timeline.spans) == 20
    assert_same_bits(steps[0], steps[1])
    assert_same_bits(steps[0], steps[2])
    if output_mode == "all":
        ones, fours, fives = (
            [torch.cat([r[i].reshape(-1) for r in result]) for i in (0, 1)] for result in results
        )
        assert_same_bits(ones, fours)
        assert_same_bits(ones, fives)


def test_a_failing_step_leaves_what_the_last_complete_one_made():
    model, expected, single = Net(), Net(), Net()
    step = compiled(model, "momentum", 4)
    rows, y = data(4)
    bad = rows.clone()
    bad[2 * ROWS + 1] = 9  # the table has seven rows
    with pytest.raises(ExecutionError, match=r"self\.table\(rows\)") as caught:
        step(bad, y)
    assert caught.value.micro_batch == 2
    assert step.executable.step == 2
    train(expected, OPTIMIZERS["momentum"](expected.parameters()), rows[: 2 * ROWS], y[: 2 * ROWS])
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    other = compiled(single, "momentum", 1)
    for some in range(2):
        other(*(t[some * ROWS : (some + 1) * ROWS] for t in (rows, y)))
    assert_same_bits(model.state_dict(), single.state_dict())
    step(rows, y)
    assert step.executable.step == 6


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupt_between_two_looks_leaves_complete_steps(number, when, monkeypatch):
    """The library gives Python a look after each step here."""
    model, single = Net(), Net()
    unchecked = {"check_compiled": "off"}  # a check would call the function
    step = compiled(model, "momentum", 4, **unchecked)
    other = compiled(single, "momentum", 1, **unchecked)
    rows, y = data(4)
    advance, calls = Repetition.advance, []

    def interrupted(steps, end, seconds):
        calls.append(end)
        if len(calls) == number and when == "before":
            raise KeyboardInterrupt
        advance(steps, end, seconds)
        if len(calls) == number and when == "after":
            raise KeyboardInterrupt

    monkeypatch.setattr(replayed_step, "SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Repetition, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(rows, y)
    complete = number - (when == "before")
    assert step.executable.step == complete
    for some in range(complete):
        other(*(t[some * ROWS : (some + 1) * ROWS] for t in (rows, y)))
    assert_same_bits(model.state_dict(), single.state_dict())
    step(rows, y)
    for some in range(4):
        other(*(t[some * ROWS : (some + 1) * ROWS] for t in (rows, y)))
    assert_same_bits(model.state_dict(), single.state_dict())


class Mixing(torch.optim.Optimizer):
    """Its rule reads a weight also where it does not write it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                mixed = weight.t() if weight.dim() == 2 else weight.flip(0)
                weight.sub_(group["lr"] * (weight.grad + 0.1 * mixed.clone()))


def test_a_weight_that_is_read_elsewhere_is_not_overwritten():
    def mixing(force):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        whole = nn.Module()
        whole.model = model
        whole.forward = lambda x: F.mse_loss(model(x), x)
        options = Options("inductor", device_iterations=5, force=force)
        step = compile_training(whole, Mixing(model.parameters()), options)
        step(torch.linspace(-1, 1, 5 * 4 * 8).reshape(20, 8))
        return step, model

    (step, ours), (_, theirs) = mixing({}), mixing({"ReplaySteps": False})
    assert repeats(step)
    assert not step.executable.fused.now.replay.in_place
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_what_cannot_be_repeated_is_called_and_says_why():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return F.mse_loss(self.layer(x).sort(stable=True).values, x)

    model = Sorted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, Options("inductor", device_iterations=2))
    step.compile(torch.randn(6, 4))
    assert "computes something" in step.executable.fused.now.replay
    assert "called by Python: " in str(step.executable.host_program)
    step(torch.randn(6, 4))


def test_the_default_device_of_a_call_does_not_matter():
    model, other = Net(), Net()
    step, plain = (compiled(m, "momentum", 3) for m in (model, other))
    for run in (step, plain):
        run(*data(3))
    rows, y = data(3)
    with torch.device("meta"):
        step(rows, y)
    plain(*data(3))
    assert_same_bits(dict(model.state_dict()), dict(other.state_dict()))
