"""Check that a step fused into one function is the step: values, states, failures, layouts."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import CompileError, ExecutionError, Options, compile_training, identity_loss
from ipu_dynamo.errors import ProgramError
from ipu_dynamo.passes.host.step import fusing_costs as costs_of_fusing
from ipu_dynamo.passes.host.step.fuse_step import FuseStep
from ipu_dynamo.passes.host.step.fusing_costs import fusing_costs
from ipu_dynamo.runtime.execute.timeline import Timeline
from ipu_dynamo.testing import assert_same_bits

ROWS, ITERATIONS = 4, 3
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd, decay, maximize": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


class Net(nn.Module):
    """A convolution, running statistics, a weight that is read twice, and parameters of no
    dimension, of one element and of none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(1, 3, 2, bias=False), nn.BatchNorm2d(3)
        self.last = nn.Linear(12, 12)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(1))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x, y):
        h = self.norm(self.conv(x)).relu().flatten(1) * self.scale + self.shift
        return F.cross_entropy(self.last(self.last(h + self.nothing.sum())), y)


class Lookup(nn.Module):
    """Fails on a row that the table has not got."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(5, 4), nn.BatchNorm1d(4)

    def forward(self, rows):
        h = self.norm(self.table(rows))
        return F.mse_loss(h, h.detach() + 1)


# The eager engine is forced to fuse: its results show that the fused graph is right.
FUSED = Options("eager", force={"FuseStep": True})


def data(seed, iterations=ITERATIONS):
    rng = torch.Generator().manual_seed(seed)
    rows = iterations * ROWS
    x = torch.randn(rows, 1, 3, 3, generator=rng)
    return x, torch.randint(12, (rows,), generator=rng)


def compiled(model, optimizer, *, iterations=ITERATIONS, engine="eager"):
    options = replace(FUSED, device_iterations=iterations, engine=engine)
    step = compile_training(model, optimizer, options)
    step.compile(*data(0, iterations))
    assert step.executable.fused
    return step


def train(model, optimizer, x, y):
    for rows, wanted in zip(x.split(ROWS), y.split(ROWS), strict=True):
        optimizer.zero_grad()
        loss = model(rows, wanted)
        loss.backward()
        optimizer.step()
    return loss.detach()


def compare(name, engine, calls):
    """Train with a rate that changes between calls; compare loss, tensors and states."""
    model = Net()
    expected, reference = copy.deepcopy(model), OPTIMIZERS[name]
    optimizer, torch_optimizer = reference(model.parameters()), reference(expected.parameters())
    step = compiled(model, optimizer, engine=engine)
    for call in range(calls):
        x, y = data(call)
        loss = train(expected, torch_optimizer, x, y)
        torch.testing.assert_close(step(x, y), loss)
        for group in (*optimizer.param_groups, *torch_optimizer.param_groups):
            group["lr"] *= 0.5
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    step.read_optimizer_state()
    ours, theirs = optimizer.state_dict()["state"], torch_optimizer.state_dict()["state"]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_function_that_writes_another_type_is_refused():
    model = Net()
    fused = compiled(model, OPTIMIZERS["momentum"](model.parameters())).executable.fused.now
    place = fused.fused.state.index("scale")
    wide = [value.double() if i == place else value for i, value in enumerate(fused.stored_tensors)]
    with pytest.raises(ProgramError, match=r"returned f64\[\] for %scale, a f32\[\]"):
        fused.check(wide)
    outputs = list(fused.fused.function.outputs)
    outputs[place] = replace(outputs[place], dtype=torch.float64)
    with pytest.raises(ProgramError, match=r"writes f64\[\] to %scale, which is f32\[\]"):
        replace(fused.fused, function=replace(fused.fused.function, outputs=tuple(outputs)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_torch(name):
    compare(name, "eager", calls=3)


@pytest.mark.slow
@pytest.mark.inductor
def test_trains_as_torch_when_compiled():
    compare("nesterov", "inductor", calls=2)


def test_iterations_of_a_call_are_calls():
    models = Net(), Net()
    steps = [
        compiled(model, OPTIMIZERS["momentum"](model.parameters()), iterations=count)
        for model, count in zip(models, (ITERATIONS, 1), strict=True)
    ]
    x, y = data(1)
    steps[0](x, y)
    for rows, wanted in zip(x.split(ROWS), y.split(ROWS), strict=True):
        steps[1](rows, wanted)
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert_same_bits(a, b)


def test_a_momentum_that_becomes_zero_makes_another_function_and_a_rate_does_not():
    model = Net()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    step = compiled(model, optimizer)
    for call, (momentum, rate) in enumerate([(0.9, 0.1), (0.0, 0.1), (0.9, 0.0), (0.9, 0.1)]):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group |= {"momentum": momentum, "lr": rate}
        step(*data(call))
        train(expected, reference, *data(call))
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    assert step.functions_compiled == 2


class Scaled(nn.Module):
    """The gradient of the weight is the input, which may be infinite."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, x):
        return identity_loss((self.weight * x).sum(), "none")


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.0),
        lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.0),
        lambda p: torch.optim.Adam(p, lr=0.0),
        lambda p: torch.optim.AdamW(p, lr=0.0, weight_decay=0.0),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.0), eps=0.0),
    ],
    ids=["sgd", "momentum", "no momentum", "adam", "adamw", "no betas"],
)
def test_numbers_that_are_zero_meet_infinite_gradients_as_in_torch(make):
    model, expected = Scaled(), Scaled()
    optimizer, reference = make(model.parameters()), make(expected.parameters())
    step = compile_training(model, optimizer, FUSED)
    for x in ([1.0, 2.0, 0.0], [1.0, float("inf"), -1.0], [1.0, 1.0, 1.0]):
        reference.zero_grad()
        expected(torch.tensor([x])).backward()
        reference.step()
        step(torch.tensor([x]))
        assert step.executable.fused
        torch.testing.assert_close(model.weight, expected.weight, equal_nan=True)
    if optimizer.defaults.get("betas") == (0.0, 0.0):
        step.read_optimizer_state()
        ours, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_a_failing_step_leaves_what_the_last_complete_one_made():
    model, whole = Lookup(), Lookup()
    steps = [
        compile_training(
            one,
            torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9),
            replace(FUSED, device_iterations=count),
        )
        for one, count in ((model, 3), (whole, 1))
    ]
    good = torch.tensor([0, 1, 2, 3])
    steps[0].compile(good.repeat(3))
    assert steps[0].executable.fused
    with pytest.raises(ExecutionError, match=r"table\(rows\)") as caught:
        steps[0](torch.cat([good, good + 1, good + 2]))
    assert caught.value.micro_batch == 2
    steps[1](good)
    steps[1](good + 1)
    for a, b in zip(model.state_dict().values(), whole.state_dict().values(), strict=True):
        assert_same_bits(a, b)
    steps[0](good.repeat(3))  # it can be called again


def recorded_and_plain(engine):
    """Two equal trainings, of which one records its second call; its timeline."""
    runs = []
    for records in (True, False):
        model = Net()
        step = compiled(model, torch.optim.AdamW(model.parameters(), lr=0.01), engine=engine)
        compilations, timeline = step.functions_compiled, Timeline()
        losses = []
        for call in range(3):
            step.executable.timeline = timeline if records and call == 1 else None
            losses.append(step(*data(call)))
        assert step.functions_compiled == compilations
        runs.append((losses, model.state_dict(), timeline))
    (losses, state, timeline), (other_losses, other_state, empty) = runs
    assert_same_bits((losses, state), (other_losses, other_state))
    assert not empty.spans
    return timeline


def test_a_recorded_call_changes_no_bit_and_compiles_nothing():
    timeline = recorded_and_plain("eager")
    (function,) = {span.function for span in timeline.spans}
    assert function.startswith("whole_")
    name = "stage 0 forward and backward, micro-batch 0, replica 0"
    assert [span.name for span in timeline.spans] == [name] * ITERATIONS
    assert all(span.worker == 0 for span in timeline.spans)
    assert all(span.start <= span.end for span in timeline.spans)
    assert timeline.busy()[0] > 0


@pytest.mark.slow
@pytest.mark.inductor
def test_a_recorded_call_of_compiled_code_changes_no_bit():
    assert len(recorded_and_plain("inductor").spans) == ITERATIONS


@pytest.mark.parametrize(
    "options",
    [{"gradient_accumulation": 2}, {"replicas": 2}, {"stochastic_rounding": True}],
)
def test_other_steps_stay_apart(options):
    width = 4
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    if "stochastic_rounding" in options:
        model = model.half()
    like = next(model.parameters())

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return F.mse_loss(self.model(x), x)

    own = Loss()
    step = compile_training(
        own, torch.optim.SGD(own.parameters(), lr=0.1), Options(engine="eager", **options)
    )
    step.compile(torch.zeros(2, width, dtype=like.dtype))
    assert not FuseStep()(step.parts.compiled.written).fused
    forced = replace(FUSED, **options)
    step = compile_training(own, torch.optim.SGD(own.parameters(), lr=0.1), forced)
    with pytest.raises(CompileError, match="cannot be one function: "):
        step.compile(torch.zeros(2, width, dtype=like.dtype))


class Wide(nn.Module):
    """The product that is its gradient stores it, where the step is not fused."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(512, 512)

    def forward(self, x):
        return F.mse_loss(self.layer(x), x)


def test_a_large_step_is_fused_too():
    model, reference = Wide(), Wide()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
    step = compile_training(model, torch.optim.Adam(model.parameters(), lr=0.1), FUSED)
    for seed in range(2):
        x = torch.randn(3, 512, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        reference(x).backward()
        optimizer.step()
        step(x)
    written = [n.target for f in step.parts.compiled.written.inlined.functions for n in f.operators]
    assert torch.ops.ipu.accumulate_matmul.default in written
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_step_is_fused_where_that_gains_more_than_it_costs(monkeypatch):
    model = Wide()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), Options("eager"))
    step.compile(torch.zeros(3, 512))
    written = step.parts.compiled.written
    (decision,) = FuseStep()(written).decisions[len(written.decisions) :]
    assert (decision.choice, decision.reason) == ("fused", str(fusing_costs(written.inlined)))
    for name, value in (("MOST_COPIES", 2**20), ("STEPS_OF_A_TRAINING", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(costs_of_fusing, name, value)
            assert not FuseStep()(written).fused


def test_a_parameter_that_becomes_another_keeps_apart_from_it():
    class Swap(nn.Module):
        """Exchanges two buffers in every step."""

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("a", torch.zeros(2))
            self.register_buffer("b", torch.ones(2))

        def forward(self, x):
            old = self.a.clone()
            self.a.copy_(self.b)
            self.b.copy_(old)
            return F.mse_loss(self.w * x, x + 1)

    model = Swap()
    step = compile_training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        replace(FUSED, device_iterations=3),
    )
    step(torch.ones(3, 2))
    assert step.executable.fused
    assert model.a.tolist() == [1.0, 1.0]
    assert model.b.tolist() == [0.0, 0.0]
