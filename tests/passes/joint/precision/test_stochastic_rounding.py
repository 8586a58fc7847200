"""Check that rounding at random is unbiased, exact where it can be, and reproducible."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import poptorch
from ipu_dynamo import BeginBlock, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.capture.capture import RANDOM_KEY
from ipu_dynamo.options import OptionError
from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.passes.pipeline import aot_passes
from ipu_dynamo.runtime.update.rounding import rounded
from ipu_dynamo.testing import assert_same_bits
from tests.passes.joint.precision.test_upcast_half_matmuls import Net, whole_numbers
from tests.properties.evaluate import captured, check, evaluate, named_inputs

ON = Options(engine="eager", stochastic_rounding=True, seed=5)
DRAWS = 1_000_000


class ToHalf(nn.Module):
    def forward(self, x):
        return x.half()


def by_pass(x):
    return compile_inference(ToHalf(), ON)(x)


def by_update(x):
    generator = torch.Generator().manual_seed(5)
    return rounded(x, torch.randint(1 << 13, x.shape, dtype=torch.int32, generator=generator))


@pytest.mark.few(10)
@pytest.mark.parametrize("low", [1.0, -2048.0, 2.0**-24])
@pytest.mark.parametrize("distance", [1 / 16, 0.3, 0.5, 0.8, 15 / 16])
@pytest.mark.parametrize("way", [by_pass, by_update])
def test_mean_and_variance_are_those_of_the_two_halves_around(way, distance, low):
    low_half = torch.tensor(low).half()
    step = torch.nextafter(low_half, low_half.new_tensor(math.copysign(math.inf, low))) - low_half
    given_value = torch.tensor(low + distance * step.double().item())
    share = (given_value.double().item() - low) / step.double().item()
    drawn = (way(given_value.expand(DRAWS).contiguous()).double() - low) / step.double()
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    deviation = math.sqrt(share * (1 - share))
    z_mean = (drawn.mean().item() - share) / (deviation / math.sqrt(DRAWS))
    assert abs(z_mean) < 4.5
    squares = (drawn - share) ** 2
    spread = squares.std().item() / math.sqrt(DRAWS)
    difference = squares.mean().item() - share * (1 - share)
    assert abs(difference) < 4.5 * spread + 1e-9  # at a half all squares are equal


@given(bits=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=50))
def test_halves_are_unchanged(bits):
    halves = torch.tensor(bits, dtype=torch.int16).view(torch.float16)
    for way in (by_pass, by_update):
        found = way(halves.float())
        assert torch.equal(found.isnan(), halves.isnan())
        assert torch.equal(found.nan_to_num(), halves.nan_to_num())


@given(value=st.floats(width=32, allow_nan=False), seed=st.integers(0, 99))
def test_results_are_one_of_the_two_halves_around(value, seed):
    x = torch.full((64,), value)
    found = compile_inference(
        ToHalf(), Options(engine="eager", stochastic_rounding=True, seed=seed)
    )(x)
    toward_zero = torch.tensor(value).half()
    if toward_zero.float().abs() > abs(value):
        toward_zero = torch.nextafter(toward_zero, torch.zeros_like(toward_zero))
    away = torch.nextafter(toward_zero, toward_zero.new_tensor(math.copysign(math.inf, value)))
    assert all(f in (toward_zero, away) for f in found)


@pytest.mark.examples(5)
@given(seed=st.integers(0, 99), training=st.booleans())
def test_keeps_exact_values_and_does_nothing_twice(seed, training):
    model, x = whole_numbers(Net(), seed)
    name = "StochasticRounding"
    capture, one = captured(model, (x,), ON, training=training, before=name)
    inputs = named_inputs(model, (x,))
    before = evaluate(capture, inputs)
    assert one(capture)
    check(capture)
    after = evaluate(capture, {**inputs, RANDOM_KEY: torch.tensor([3, 4], dtype=torch.int32)})
    assert {k for k in before if not torch.equal(after[k], before[k])} == set()
    text = write_level(capture)
    assert not one(capture)
    assert write_level(capture) == text


class Pipeline(nn.Module):
    def __init__(self, ipus):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8).half(), nn.Linear(8, 8).half()
        for layer, ipu in zip((self.first, self.second), ipus, strict=True):
            BeginBlock(layer, ipu_id=ipu)

    def forward(self, x, y):
        out = self.second(torch.tanh(self.first(x)))
        return out, F.mse_loss(out, y)


def trained(ipus=(0, 0), *, calls=2, **settings):
    model = Pipeline(ipus)
    options = Options(engine="eager", stochastic_rounding=True, seed=5, **settings)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    torch.manual_seed(1)
    outputs = [step(torch.randn(4, 8).half(), torch.randn(4, 8).half()) for _ in range(calls)]
    return {"outputs": outputs, "state": {k: v.clone() for k, v in model.state_dict().items()}}


def test_a_seed_gives_the_same_bits_for_any_placement_and_another_seed_does_not():
    settings = {"gradient_accumulation": 4, "strategy": Strategy("pipelined")}
    one = trained(**settings)
    assert_same_bits(trained((0, 1), **settings), one)
    sharded = {**settings, "strategy": Strategy("sharded")}
    assert_same_bits(trained((1, 0), **sharded), one)  # the second layer is updated first
    assert not torch.equal(trained(calls=1)["outputs"][0][0], trained()["outputs"][1][0])
    other = compile_inference(ToHalf(), Options(engine="eager", stochastic_rounding=True, seed=6))
    x = torch.rand(100)
    assert not torch.equal(other(x), by_pass(x))


def test_small_updates_are_not_lost():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(10_000, dtype=torch.float16))

        def forward(self, x):
            return poptorch.identity_loss(self.weight * x, "sum")

    means = []
    for stochastic in (False, True):
        model = Sum()
        options = Options(engine="eager", stochastic_rounding=stochastic, seed=0)
        step = compile_training(model, torch.optim.SGD(model.parameters(), lr=2.0**-14), options)
        for _ in range(8):  # 1 - 2**-14 rounds to 1: halves below 1 are 2**-11 apart
            step(torch.ones(10_000, dtype=torch.float16))
        means.append(model.weight.double().mean().item())
    assert "round at random" in str(step.program)
    assert means[0] == 1
    expected = 8 * 2.0**-14
    assert abs((1 - means[1]) - expected) < 4.5 * math.sqrt(8 / 8) * 2.0**-11 / 100


def test_torch_compile_refuses():
    with pytest.raises(OptionError, match="compile_training"):
        aot_passes(ON)


def test_poptorch_rounds_at_random():
    options = poptorch.Options()
    options.Precision.enableStochasticRounding(True)
    options.randomSeed(1)
    found = poptorch.inferenceModel(ToHalf(), options)(torch.full((1000,), 1 + 2.0**-11))
    assert set(found.float().tolist()) == {1.0, 1 + 2.0**-10}


class ChangedSlice(nn.Module):
    """A change of a slice, whose backward pass copies into new memory."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4).half()

    def forward(self, x):
        h = self.layer(x)
        h[:, :2] += 1.0
        return poptorch.identity_loss(h, "sum")


def test_memory_that_nothing_was_written_to_is_not_rounded():
    data = (torch.ones(2, 4).half(),)
    capture, one = captured(ChangedSlice(), data, ON, before="StochasticRounding")
    one(capture)
    graph = capture.graph.graph
    unfilled = graph.find_nodes(op="call_function", target=torch.ops.aten.new_empty_strided.default)
    assert unfilled
    assert all(node.meta["val"].dtype == torch.float16 for node in unfilled)
