"""Check plans by cost against all splits there are, and "auto" in a model."""

import logging
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import blocks
from ipu_dynamo.optimum import (
    IncompatibleIPUConfigError,
    IPUConfig,
    deparallelize,
    parallelize,
    plan_layers,
)
from ipu_dynamo.optimum.placement import traced_layers
from ipu_dynamo.optimum.placement.layer_plans import balance
from tests.optimum.small_models import SMALL, TwoLists, small
from tests.optimum.test_parallelize import begun

seconds = st.lists(st.floats(0.0, 9.0), min_size=1, max_size=12)


@pytest.mark.examples(200)
@given(
    seconds, st.floats(0.0, 9.0), st.lists(st.just(-1) | st.integers(0, 3), min_size=1, max_size=4)
)
def test_no_other_split_is_more_than_a_percent_faster(costs, before, fixed):
    every = [
        [b - a for a, b in pairwise((0, *cuts, len(costs)))]
        for cuts in combinations_with_replacement(range(len(costs) + 1), len(fixed) - 1)
    ]
    every = [
        counts
        for counts in every
        if all(want in (-1, got) for want, got in zip(fixed, counts, strict=True))
    ]

    def slowest(counts):
        edges = [sum(counts[:i]) for i in range(len(counts) + 1)]
        parts = [sum(costs[a:b]) for a, b in pairwise(edges)]
        return max(parts[0] + before, *parts[1:], 0.0)

    if not every:
        with pytest.raises(IncompatibleIPUConfigError, match=f"the model {len(costs)}"):
            balance(costs, before, fixed)
        return
    counts, times = balance(costs, before, fixed)
    assert counts in every
    assert max(times) == pytest.approx(slowest(counts))
    assert slowest(counts) <= 1.011 * min(map(slowest, every)) + 1e-9


@given(st.integers(1, 40), st.integers(1, 8))
def test_equal_layers_differ_by_one_at_most(layers, ipus):
    counts, _ = balance([0.25] * layers, 0.0, [-1] * ipus)
    assert counts == sorted(counts)
    assert sum(counts) == layers
    assert counts[-1] - counts[0] <= 1


class Slow(nn.Module):
    """A model whose layers 2 and 3 do much more than the others; what its head does is nothing."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Part(heavy) for heavy in (False, True, True, False))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Part(nn.Module):
    def __init__(self, heavy):
        super().__init__()
        self.linear, self.heavy = nn.Linear(4, 4), heavy

    def forward(self, x):
        for _ in range(9 if self.heavy else 1):
            x = torch.tanh(self.linear(x))
        return x


@pytest.fixture
def counted(monkeypatch):
    """Every operator takes a second forward, and two backward if that counts."""

    def costs(capture, options, *, loss):
        assert options.strategy.ipus == 2
        both = (1.0, 2.0) if capture.training else (1.0, 0.0)
        assert (loss == 0) == capture.training
        return (both,) * sum(map(traced_layers.computes, capture.graph.graph.nodes))

    monkeypatch.setattr(traced_layers, "measured_costs", costs)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_auto_cuts_by_cost_and_writes_the_numbers_back(counted, mode, caplog):
    config = IPUConfig(layers_per_ipu="auto", ipus_per_replica=2)
    config.mode = mode
    model, sample = Slow(), (torch.randn(2, 4),)
    with caplog.at_level(logging.INFO, "ipu_dynamo.optimum"):
        parallelize(model, config, sample=sample)
    assert "layers_per_ipu=[2, 2], in ms" in caplog.text
    assert config._layers_per_ipu == [2, 2]
    other = {"training": "inference_layers_per_ipu", "inference": "layers_per_ipu"}[mode]
    assert getattr(config, other) == "auto"
    assert IPUConfig.from_dict(config.to_dict()) == config
    assert [begun(model)[f"layers.{layer}"] for layer in range(4)] == [0, 0, 1, 1]
    deparallelize(model)
    assert not begun(model)
    fixed = IPUConfig(layers_per_ipu=[1, -1])
    fixed.mode = mode
    plan = plan_layers(model, sample, 2, fixed)
    assert plan.layers_per_ipu == [1, 3]
    assert plan.seconds[1] > plan.seconds[0] > 0
    assert fixed.layers_per_ipu == [1, -1]


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_equal_layers_are_cut_equally_whatever_is_added_to_measure_them(counted, mode):
    config = IPUConfig()
    config.mode = mode
    model = nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(6)))
    model.forward = lambda x: nn.Sequential(*model[0])(x)
    plan = plan_layers(model, (torch.randn(4, 2),), 2, config)
    assert plan.layers_per_ipu == [3, 3]
    assert plan.seconds[0] == plan.seconds[1] > 0


def test_a_plan_that_fails_leaves_auto_in_the_configuration(counted):
    config = IPUConfig(layers_per_ipu="auto", ipus_per_replica=2)
    model = Slow()
    blocks.BeginBlock(model.layers[3], "mine")
    with pytest.raises(ValueError, match="begins a block already"):
        parallelize(model, config, sample=(torch.randn(2, 4),))
    assert config.layers_per_ipu == "auto"


def test_the_numbers_of_a_default_leave_those_of_pods(counted):
    layers = {"default": "auto", "pod16": [1, 3]}
    config = IPUConfig(layers_per_ipu=layers, ipus_per_replica=2)
    parallelize(Slow(), config, sample=(torch.randn(2, 4),))
    assert config.layers_per_ipu == {"default": [2, 2], "pod16": [1, 3]}


def test_a_tied_head_counts_where_its_table_is(counted):
    sample = SMALL["gpt2"].batch(1)
    config = IPUConfig()
    tied = plan_layers(small("gpt2", 4), sample, 2, config)
    model = small("gpt2", 4)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    untied = plan_layers(model, sample, 2, config)
    assert tied.seconds[0] > untied.seconds[0]
    assert sum(tied.seconds) == sum(untied.seconds)


@pytest.mark.slow
def test_auto_is_measured_in_a_model_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    config = IPUConfig(layers_per_ipu="auto", ipus_per_replica=2)
    model = parallelize(small("t5", 4), config, sample=SMALL["t5"].batch(1))
    assert sum(config.layers_per_ipu) == 4
    assert len(config.layers_per_ipu) == 2
    deparallelize(model)


def test_auto_needs_a_call():
    config = IPUConfig(layers_per_ipu="auto", ipus_per_replica=2)
    with pytest.raises(ValueError, match=r'layers_per_ipu="auto" measures a call: pass sample='):
        parallelize(Slow(), config)
    assert config.layers_per_ipu == "auto"


@pytest.mark.parametrize("sample", [torch.ones(1, 4), [torch.ones(1, 4)], 3], ids=str)
def test_a_sample_is_arguments(sample):
    kind = type(sample).__name__
    for use in (
        lambda: parallelize(Slow(), IPUConfig(), sample=sample),
        lambda: plan_layers(Slow(), sample, 2, IPUConfig()),
    ):
        with pytest.raises(TypeError, match=rf"such as \(x,\) or .* and not a {kind}"):
            use()


def test_plans_are_for_ipus_and_of_a_call():
    for n in (0, -1, 1.5, "2", None):
        with pytest.raises(ValueError, match=f"n={n!r} is no number of IPUs"):
            plan_layers(Slow(), (torch.ones(1, 4),), n, IPUConfig())
    with pytest.raises(TypeError, match="sample= is its arguments, and not None"):
        plan_layers(Slow(), None, 2, IPUConfig())


def test_a_sample_says_in_which_order_lists_run():
    class Found(TwoLists):
        _no_split_modules = ("Block",)

    config = IPUConfig(ipus_per_replica=2)
    model = parallelize(Found(4), config)
    assert begun(model)["late.0"] == 0
    deparallelize(model)
    parallelize(model, config, sample={"x": torch.randn(1, 4)})
    assert begun(model)["late.0"] == 1
