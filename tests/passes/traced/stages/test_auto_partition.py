"""Check that automatic cuts are balanced, legal, and keep what the model computes."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import Block, CompileError, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.options import OptionError
from ipu_dynamo.passes.traced.stages.auto_partition import plan
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.tune import autotune_cache
from ipu_dynamo.whole_step import measured_costs

times = st.floats(0.0, 10.0).map(lambda x: round(x, 2))


def slowest(costs, cuts, *, again):
    """The time of the slowest stage of a cut."""
    edges = [0, *cuts, len(costs)]
    stages = [
        sum(f + b + (f if again and end != len(costs) else 0) for f, b in costs[start:end])
        for start, end in pairwise(edges)
    ]
    return max(stages)


@given(data=st.data(), again=st.booleans())
def test_no_cut_is_more_than_a_percent_better(data, again):
    costs = data.draw(st.lists(st.tuples(times, times), min_size=2, max_size=9))
    stages = data.draw(st.integers(1, min(4, len(costs))))
    crossing = data.draw(
        st.lists(st.integers(0, 9), min_size=len(costs) + 1, max_size=len(costs) + 1)
    )
    cuts = plan(tuple(costs), crossing, stages, again=again)
    assert len(cuts) == stages - 1
    assert all(a < b for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True))
    every = combinations(range(1, len(costs)), stages - 1)
    best = min(slowest(costs, other, again=again) for other in every)
    assert slowest(costs, cuts, again=again) <= 1.02 * best + 1e-9


def test_operators_that_cost_nothing_make_room_for_a_slow_one():
    costs = ((0.0, 0.0), (0.0, 0.0), (1.0, 0.0), (0.0, 0.0))
    cuts = plan(costs, [0, 0, 1, 0, 0], 3, again=True)
    assert cuts == (1, 2)
    assert slowest(costs, cuts, again=True) == 1.0


def test_of_equal_cuts_one_that_sends_little_is_taken():
    costs = ((1.0, 1.0), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0))
    assert plan(costs, [0, 8, 2, 8, 0], 2, again=False) == (2,)


class Chain(nn.Module):
    """Layers of different widths, and dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = F.dropout(layer(h).relu(), 0.2)
        return F.mse_loss(h, x)


def trained(strategy, calls=2):
    model = Chain()
    options = Options(engine="eager", gradient_accumulation=6, seed=3, strategy=strategy)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    rng = torch.Generator().manual_seed(0)
    for _ in range(calls):
        step(torch.randn(6 * 2, 4, generator=rng))
    return model, step


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["pipelined", "sharded"])
@pytest.mark.parametrize("ipus", [1, 2, 3])
def test_a_model_that_was_cut_learns_the_same(kind, ipus):
    whole, _ = trained(Strategy())
    parts, step = trained(Strategy(kind, ipus=ipus))
    assert step.program.num_ipus == ipus
    assert {call.ipu for call in step.program.calls} == set(range(ipus))
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())


class Average(nn.Module):
    """A layer whose buffer is read, changed and read again, among others that take longer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        h = self.first(x) - self.mean
        self.mean.mul_(0.5).add_(h.detach().mean(0), alpha=0.5)
        return F.mse_loss(self.last(h + self.mean), x)


def test_a_variable_that_changes_stays_in_one_stage_of_a_pipeline():
    models, x = [Average(), Average()], torch.randn(12, 4)
    strategies = [Strategy(), Strategy("pipelined", ipus=2, costs=((1.0, 1.0),) * 10)]
    for model, strategy in zip(models, strategies, strict=True):
        options = Options(engine="eager", gradient_accumulation=6, strategy=strategy)
        step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
        step(x)
        step.read_weights()
    assert {call.ipu for call in step.program.calls} == {0, 1}
    assert_same_bits(*(model.state_dict() for model in models))
    strategy = replace(strategies[1], ipus=6)
    options = Options(engine="eager", gradient_accumulation=12, strategy=strategy)
    model = Average()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    with pytest.raises(CompileError, match="between uses of a variable that the model changes"):
        step(torch.randn(24, 4))


def test_given_costs_decide():
    _, step = trained(Strategy("pipelined", ipus=2))
    count = len(step.costs)
    assert count >= 16  # five layers of three operators, and the loss
    assert all(forward >= 0 and backward >= 0 for forward, backward in step.costs)

    def weights_on_the_first(costs):
        _, step = trained(Strategy("pipelined", ipus=2, costs=costs), calls=1)
        return sum(v.kind == "parameter" and v.ipu == 0 for v in step.program.variables)

    heavy_start = ((9.0, 9.0), *[(0.1, 0.1)] * (count - 1))
    heavy_end = (*[(0.1, 0.1)] * (count - 1), (9.0, 9.0))
    assert weights_on_the_first(heavy_start) == 2
    assert weights_on_the_first(heavy_end) == 10


def test_what_was_measured_first_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", str(tmp_path / "figures"))
    _, first = trained(Strategy("pipelined", ipus=2), calls=1)
    monkeypatch.setattr(measured_costs, "operator_times", None)
    _, second = trained(Strategy("pipelined", ipus=2), calls=1)
    autotune_cache.forget()  # as in another process
    _, third = trained(Strategy("pipelined", ipus=2), calls=1)
    assert first.costs == second.costs == third.costs


def test_of_two_processes_that_measure_at_once_both_have_the_first_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", str(tmp_path / "figures"))
    measure, other = measured_costs.operator_times, []

    def overtaken(*arguments, **settings):
        monkeypatch.setattr(measured_costs, "operator_times", measure)
        _, step = trained(Strategy("pipelined", ipus=2), calls=1)
        other.append(step.costs)
        autotune_cache.forget()
        return dict.fromkeys(measure(*arguments, **settings), 1.0)

    monkeypatch.setattr(measured_costs, "operator_times", overtaken)
    _, step = trained(Strategy("pipelined", ipus=2), calls=1)
    assert [step.costs] == other


@pytest.mark.parametrize("folder", ["off", "full"])
def test_what_cannot_be_kept_is_estimated(folder, monkeypatch, tmp_path):
    """Else another process, or the next run, would cut the model otherwise."""
    if folder == "off":
        monkeypatch.setattr(measured_costs, "operator_times", None)
    else:
        (tmp_path / "operators").touch()  # stands where the figures are to lie
    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", "off" if folder == "off" else str(tmp_path))
    _, first = trained(Strategy("pipelined", ipus=2), calls=1)
    _, second = trained(Strategy("pipelined", ipus=2), calls=1)
    assert first.costs == second.costs
    assert any(forward > 0 for forward, _ in first.costs)
    assert first.program.text() == second.program.text()


def test_an_inference_is_cut_too():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    strategy = Strategy("pipelined", ipus=2)
    options = Options(engine="eager", device_iterations=2, strategy=strategy)
    x = torch.randn(4, 3)
    step = compile_inference(model, options)
    torch.testing.assert_close(step(x), model(x))
    assert step.program.num_ipus == 2


class Marked(nn.Module):
    """Says itself where a stage begins."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with Block("a", 0):
            return F.mse_loss(self.layer(x), x)


def test_what_cannot_be_cut_is_refused():
    def compile_with(model, **given):
        options = Options(engine="eager", gradient_accumulation=3, strategy=Strategy(**given))
        step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
        step.compile(torch.zeros(6, 4))

    with pytest.raises(CompileError, match="block 'a' begins here"):
        compile_with(Marked(), kind="pipelined", ipus=2)
    with pytest.raises(CompileError, match="cannot be cut into 99 stages"):
        compile_with(Chain(), kind="sharded", ipus=99)
    with pytest.raises(CompileError, match="3 operators, and the model has"):
        compile_with(Chain(), kind="sharded", ipus=2, costs=((1.0, 1.0),) * 3)
    with pytest.raises(CompileError, match="needs at least 5 micro-batches"):
        compile_with(Chain(), kind="pipelined", ipus=3)
    with pytest.raises(OptionError, match="costs say where"):
        Strategy(costs=((1.0, 1.0),))
    with pytest.raises(OptionError, match="at least 1, or None"):
        Strategy(ipus=0)
