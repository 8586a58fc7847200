"""Check that loss scaling changes no exact number, and that the automatic one follows gradients."""

import copy
import io
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import (
    AutomaticLossScaling,
    BeginBlock,
    CompileError,
    Options,
    Strategy,
    bisect,
    compile_inference,
    compile_training,
    identity_loss,
)
from ipu_dynamo.options import OptionError
from ipu_dynamo.program import Program
from ipu_dynamo.testing import assert_same_bits, options_for, placements_of
from ipu_dynamo.testing.batchings import micro_batches
from tests.properties.running import EAGER_FIRST_OF_SEVERAL

LARGEST = 65504.0
AUTOMATIC = AutomaticLossScaling()
EAGER = Options("eager", automatic_loss_scaling=AUTOMATIC)


class Whole(nn.Module):
    """Three layers of small integers that compute in half precision."""

    def __init__(self, *, mixed=False, half_loss=False, seed=0):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(3, 3) for _ in range(3))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
        if not mixed:
            self.half()
        self.half_loss = half_loss

    def forward(self, x):
        for layer in (self.first, self.second, self.last):
            x = layer(x).clamp(-3, 3)
        return identity_loss(x if self.half_loss else x.float(), "sum")


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (count, 3), generator=generator).half()


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


@st.composite
def scaled(draw, options):
    """`options` with the loss scale moved by powers of two, in one of the ways there are.

    Whatever the way, gradients are divided, so that half weights are updated in float32.
    """
    way = draw(st.sampled_from(["fixed", "variable", "automatic"]))
    count = options.gradient_accumulation
    undivided = {1 / count, 1 / (count * options.replicas)} if way == "fixed" else set()
    scales = [2.0**power for power in (-2, -1, 1, 2, 3, 4)]
    scale = draw(st.sampled_from([scale for scale in scales if scale not in undivided]))
    if way != "automatic":
        return replace(options, loss_scale=scale, loss_scale_is_variable=way == "variable")
    watch = draw(st.sampled_from(["all", "products"]))
    settings = AutomaticLossScaling(period=draw(st.integers(1, 2)), watch=watch)
    return replace(options, loss_scale=scale, automatic_loss_scaling=settings)


@pytest.mark.parametrize("engine", EAGER_FIRST_OF_SEVERAL)
@pytest.mark.examples(300)
@given(mixed=st.booleans(), half_loss=st.booleans(), seed=st.integers(0, 99), data=st.data())
def test_powers_of_two_change_no_bit(engine, mixed, half_loss, seed, data):
    placement = data.draw(placements_of(["first", "second", "last"]))
    plain = data.draw(options_for(engine=engine, placement=placement, exact=True))
    iterations = data.draw(st.integers(1, 3))
    plain = replace(plain, narrow=True, device_iterations=iterations, return_period=1)
    if placement.strategy.kind == "pipelined" and data.draw(st.booleans()):
        plain = replace(plain, strategy=replace(plain.strategy, schedule="zero_bubble"))
    if data.draw(st.booleans()):
        plain = replace(plain, workers=2, recompute=data.draw(st.sampled_from(["off", "all"])))
    found = []
    for options in (replace(plain, loss_scale_is_variable=True), data.draw(scaled(plain))):
        model = placement.place(Whole(mixed=mixed, half_loss=half_loss, seed=seed))
        optimizer = momentum(model)
        step = compile_training(model, optimizer, options)
        losses = [step(rows(2 * micro_batches(options), seed)) for _ in range(2)]
        state = [optimizer.state_dict()["state"][i] for i in range(6)]
        found.append({"losses": losses, "model": dict(model.state_dict()), "state": state})
    assert_same_bits(*found)


class Linear(nn.Module):
    """Its gradients do not depend on its weight: that of h is c, that of the weight c.T @ x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))

    def forward(self, x, c):
        h = F.linear(x, self.weight)
        return identity_loss(h.float() * c, "sum")


def large(x, c, scale, edge, watch):
    """How many elements of the two gradients of a micro-batch are large, and how many there are."""
    of_h = (c * scale).half()
    of_weight = (of_h.float().t() @ x.float()).half()
    seen = [of_weight] if watch == "products" else [of_h, of_weight]
    counts = [(~(g.abs().double() <= edge * LARGEST)).sum().item() for g in seen]
    return sum(counts), sum(g.numel() for g in seen)


@given(
    exponent=st.integers(4, 17),
    accumulation=st.integers(1, 3),
    replicas=st.integers(1, 2),
    iterations=st.integers(1, 2),
    edge=st.sampled_from([0.125, 0.001, 0.3]),
    share=st.sampled_from([1e-7, 0.1, 0.5]),
    period=st.integers(1, 3),
    watch=st.sampled_from(["all", "products"]),
    seed=st.integers(0, 999),
)
def test_scale_follows_the_gradients(
    exponent, accumulation, replicas, iterations, edge, share, period, watch, seed
):
    automatic = AutomaticLossScaling(edge, share, period, watch)
    options = Options(
        "eager",
        iterations,
        accumulation,
        replicas,
        loss_scale=2.0**exponent,
        automatic_loss_scaling=automatic,
    )
    model, generator = Linear(), torch.Generator().manual_seed(seed)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.0), options)
    scale, above, seen, steps = 2.0**exponent, 0, 0, 0
    for _ in range(4):
        count = iterations * accumulation * replicas
        x = torch.randint(-2, 3, (2 * count, 3), generator=generator).half()
        c = torch.randint(-4, 5, (2 * count, 2), generator=generator).float()
        parts = list(zip(x.chunk(count), c.chunk(count), strict=True))
        for iteration in range(iterations):
            first = iteration * accumulation * replicas
            for one in parts[first : first + accumulation * replicas]:
                more, elements = large(*one, scale, edge, watch)
                above, seen = above + more, seen + elements
            steps += 1
            if steps % period == 0:
                scale *= 0.5 if above / seen > share else 2.0
                above = seen = 0
        step(x, c)
        assert step.loss_scale == scale


class Faint(nn.Module):
    """A network whose loss is so small that its gradients are zero in half precision."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x, y):
        out = self.last(torch.tanh(self.first(x)))
        return identity_loss(F.mse_loss(out.float(), y) * 1e-7, "none")


def train_faint(dtype, automatic=None, steps=200):
    """The losses of a training in `dtype`, with weights in float32."""
    torch.manual_seed(1)
    x = torch.randn(96, 6)
    y = torch.tanh(torch.tanh(x @ torch.randn(6, 4)) @ torch.randn(4, 3))
    y = y + 0.5 * torch.randn(96, 3)
    model = Faint()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6, momentum=0.9)
    options = Options("eager", narrow=True, automatic_loss_scaling=automatic)
    step = compile_training(model, optimizer, options)
    return [step(x.to(dtype), y).item() * 1e7 for _ in range(steps)], step


def test_trains_a_model_whose_gradients_are_too_small_for_halves():
    (exact, _), (lost, _) = train_faint(torch.float32), train_faint(torch.float16)
    found, step = train_faint(torch.float16, AUTOMATIC)
    assert exact[-1] < 0.5 * exact[0]
    assert lost[-1] == lost[0]  # all gradients are zero
    assert found[-1] == pytest.approx(exact[-1], rel=0.02)
    assert 2.0**20 < step.loss_scale < 2.0**60


def test_steps_with_overflow_are_applied():
    model = Linear()
    options = replace(EAGER, loss_scale=2.0**20)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=1.0), options)
    step(torch.ones(2, 3).half(), torch.ones(2, 2))
    assert model.weight.isinf().all()
    assert step.loss_scale == 2.0**19


def test_scale_of_a_half_loss_stays_finite():
    model = Whole(half_loss=True)
    step = compile_training(model, momentum(model), EAGER)
    scales = []
    for _ in range(30):
        step(torch.zeros(2, 3).half())
        scales.append(step.loss_scale)
    assert max(scales) <= 2.0**15
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_scale_without_any_gradient_stays_finite():
    model = Linear()
    options = replace(EAGER, device_iterations=20, loss_scale=2.0**110)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=1.0), options)
    for _ in range(2):
        step(torch.zeros(40, 3).half(), torch.zeros(40, 2))
    assert step.loss_scale == 2.0**127
    assert torch.equal(model.weight, torch.zeros_like(model.weight))


def test_nan_is_large():
    model = Linear()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=1.0), EAGER)
    step(torch.zeros(2, 3).half(), torch.full((2, 2), float("nan")))
    assert step.loss_scale == 0.5


# --- Programs -------------------------------------------------------------------------------------


def program_of(**options):
    model = Whole()
    step = compile_training(model, momentum(model), Options("eager", **options))
    step.compile(rows(2 * micro_batches(step.options)))
    return step.program


def test_program_shows_the_scale_and_reads_back():
    settings = AutomaticLossScaling(period=3)
    program = program_of(automatic_loss_scaling=settings, gradient_accumulation=2, replicas=2)
    text = str(program)
    assert "loss_scale %.loss_scale: f32[]  on ipu0" in text
    assert "/ 4 / %.loss_scale, clear" in text
    assert "adjust %.loss_scale every 3 steps by" in text
    assert Program.parse(program.text()) == program


def test_costs_nothing_when_off():
    names = "loss_scale", "aten.abs"
    for program in (program_of(), program_of(loss_scale=8.0)):
        assert not any(name in str(program) for name in names)
    variable = str(program_of(loss_scale_is_variable=True))
    assert "%.loss_scale" in variable
    assert "adjust" not in variable
    assert "aten.abs" not in variable


def test_inference_ignores_it():
    run = compile_inference(Whole(), EAGER)
    run(rows(2))
    assert "loss_scale" not in str(run.program)


def test_early_gradients_are_counted_before_those_of_weights():
    strategy = Strategy("pipelined", schedule="zero_bubble")
    options = Options(
        "eager", strategy=strategy, automatic_loss_scaling=AUTOMATIC, gradient_accumulation=5
    )
    model = Whole()
    for ipu, layer in enumerate((model.first, model.second, model.last)):
        BeginBlock(layer, ipu_id=ipu)
    step = compile_training(model, momentum(model), options)
    step.compile(rows(10))
    runs = step.executable.host_program.inlined
    by_direction = {call.direction: call for call in runs.calls if call.stage == 1}
    assert {"forward", "backward", "weights"} == by_direction.keys()
    for direction in ("backward", "weights"):
        assert ".loss_scale.within1" in by_direction[direction].arguments
    kept = [name for name in by_direction["backward"].results if name]
    assert not any("le_scalar" in name for name in kept)


def test_bisect_finds_nothing_wrong():
    options = replace(EAGER, strategy=Strategy("pipelined"))
    assert bisect(Whole(), rows(2), training=True, options=options) is None


# --- Changing and keeping it ----------------------------------------------------------------------


@pytest.mark.parametrize("automatic", [None, AUTOMATIC])
def test_another_scale_may_be_set(automatic):
    model = Linear()
    options = Options(
        "eager", automatic_loss_scaling=automatic, loss_scale_is_variable=True, loss_scale=2.0
    )
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=1.0), options)
    data = torch.ones(1, 3).half(), torch.ones(1, 2)
    step(*data)
    assert step.loss_scale == (2.0 if automatic is None else 4.0)
    step.set_loss_scale(16.0)
    step(*data)
    assert step.loss_scale == (16.0 if automatic is None else 32.0)
    assert torch.equal(model.weight, torch.full((2, 3), -2.0).half())
    with pytest.raises(OptionError, match="it is a positive number"):
        step.set_loss_scale(-1.0)


def test_a_scale_that_is_part_of_the_program_stays():
    model = Linear()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=1.0), Options("eager"))
    step.compile(torch.ones(1, 3).half(), torch.ones(1, 2))
    assert step.loss_scale == 1.0
    with pytest.raises(OptionError, match="loss_scale_is_variable=True"):
        step.set_loss_scale(2.0)


def test_checkpoints_keep_the_scale():
    options = replace(EAGER, automatic_loss_scaling=AutomaticLossScaling(period=2))

    def make():
        model = Whole(mixed=True)
        optimizer = momentum(model)
        return model, optimizer, compile_training(model, optimizer, replace(options, narrow=True))

    model, optimizer, step = make()
    for seed in range(3):
        step(rows(2, seed))
    file = io.BytesIO()
    torch.save([copy.deepcopy(model.state_dict()), optimizer.state_dict()], file)
    others = []
    for compiled_before in (False, True):
        other, its_optimizer, other_step = make()
        if compiled_before:
            other_step(rows(2))
        file.seek(0)
        weights, state = torch.load(file)
        other.load_state_dict(weights)
        its_optimizer.load_state_dict(state)
        others.append((other, other_step))
    for seed in range(3, 6):
        step(rows(2, seed))
        for other, other_step in others:
            other_step(rows(2, seed))
            assert other_step.loss_scale == step.loss_scale
            assert_same_bits(dict(other.state_dict()), dict(model.state_dict()))
    assert step.loss_scale == 8.0


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"edge": 1.0}, "edge is 1.0; it is at least 0 and less than 1"),
        ({"edge": "high"}, "edge is 'high'; it is a number"),
        ({"share": -0.1}, "share is -0.1"),
        ({"share": float("nan")}, "share is nan"),
        ({"period": 0}, "period is 0; it counts steps from 1"),
        ({"period": 1.5}, "period is 1.5"),
        ({"watch": "some"}, "watch is 'some'; choose one of all, products"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(OptionError, match=f"automatic loss scaling: {message}"):
        AutomaticLossScaling(**settings)


def test_a_switch_is_no_setting():
    with pytest.raises(
        OptionError, match=r"automatic_loss_scaling takes an .* or None, not the bool True"
    ):
        Options(automatic_loss_scaling=True)


@pytest.mark.parametrize("watch", ["all", "products"])
def test_a_model_without_half_gradients_is_refused(watch):
    settings = AutomaticLossScaling(watch=watch)
    options = Options("eager", automatic_loss_scaling=settings)
    model = Linear().float()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    with pytest.raises(CompileError, match=r"finds no gradient of .*float16 to watch"):
        step(torch.ones(1, 3), torch.ones(1, 2))
