"""Check that the strategies draw what they promise, and that users can use them as documented."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import Options
from ipu_dynamo.blocks import remove_blocks
from ipu_dynamo.testing import (
    BlockAt,
    BlockPlacement,
    Recipe,
    Step,
    assert_same_bits,
    assert_same_training,
    aten_graphs,
    modules,
    options_for,
    placements_of,
    recipes,
)
from ipu_dynamo.testing.batchings import micro_batches
from ipu_dynamo.testing.kinds import KINDS


@given(recipe=recipes(random=True))
def test_equal_recipes_build_equal_models_and_data(recipe):
    again = eval(repr(recipe), {"Recipe": Recipe, "Step": Step, "torch": torch})
    assert again == recipe
    assert_same_bits(dict(recipe.build().state_dict()), dict(again.build().state_dict()))
    assert_same_bits(recipe.data(3), again.data(3))


@given(recipe=recipes(exact=True))
def test_exact_models_sum_without_rounding(recipe):
    def gradients(dtype):
        model = recipe.build().to(dtype)
        x, extra = recipe.data(1)
        more = [tensor.to(dtype) for tensor in extra["more"]]
        extra = {**extra, "more": more, "target": extra["target"].to(dtype)}
        loss = model(x.to(dtype), extra)["loss"]
        loss.sum().backward()
        found = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
        return [tensor.detach().double() for tensor in found]

    for single, double in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert torch.equal(single, double)


@given(recipe=recipes())
def test_plain_pytorch_runs_drawn_models(recipe):
    assert recipe.runs()
    returned = recipe.build()(*recipe.data(2))
    assert all(torch.isfinite(leaf).all() for leaf in [returned["loss"]])


@given(model=modules(max_steps=2))
def test_modules_are_ready_to_be_called(model):
    assert isinstance(model, nn.Module)
    assert model(*model.recipe.data(1))["loss"].requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn(kind):
    exact = KINDS[kind].exact
    drawn = recipes(kinds=[kind], exact=exact, random=not exact)
    as_drawn = settings(phases=[Phase.generate])
    recipe = find(drawn, lambda one: one.steps, settings=as_drawn)
    assert {step.kind for step in recipe.steps} == {kind}


def test_models_shrink():
    recipe = find(recipes(), lambda one: sum(s.kind == "relu" for s in one.steps) >= 2)
    assert recipe == Recipe(steps=(Step("relu"), Step("relu")), width=1, losses=("sum",))


def test_placements_shrink():
    placement = find(placements_of(["a", "b", "c"]), lambda one: len(one.blocks) >= 2)
    assert [block.layer for block in placement.blocks] == ["a", "b"]
    assert placement.strategy.kind == "sharded"


@given(
    placement=placements_of(["a", "b", "c"], max_ipus=3, max_blocks=2),
    training=st.booleans(),
    data=st.data(),
)
def test_placements_keep_their_bounds(placement, training, data):
    assert len(placement.blocks) <= 2
    assert all(0 <= block.ipu < 3 for block in placement.blocks)
    assert all(a.layer < b.layer for a, b in pairwise(placement.blocks))
    options = data.draw(options_for(placement=placement, training=training))
    given = options.gradient_accumulation if training else options.device_iterations
    assert given >= placement.micro_batches(training=training)


def test_a_placement_begins_blocks():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    placement = BlockPlacement((BlockAt("1", "second", 3),))
    assert placement.place(model) is model
    (hook,) = model[1]._forward_pre_hooks.values()
    assert (hook.user_id, hook.ipu_id) == ("second", 3)
    remove_blocks(model)
    assert not model[1]._forward_pre_hooks


@given(options=options_for(exact=True))
def test_exact_options_divide_by_powers_of_two(options):
    parts = options.gradient_accumulation * options.replicas
    assert options.reduction == "sum" or parts.bit_count() == 1
    assert options.device_iterations == 1


@given(options=options_for(max_iterations=2, max_accumulation=2, max_replicas=2))
def test_options_keep_their_bounds(options):
    assert isinstance(options, Options)
    assert max(options.device_iterations, options.gradient_accumulation, options.replicas) <= 2


@given(case=aten_graphs(max_ops=6))
def test_graphs_are_valid_and_exact(case):
    graph, inputs = case
    graph.graph.lint()
    results = graph(*inputs)
    for node, result in zip(graph.graph.output_node().args[0], results, strict=True):
        assert node.meta["val"].shape == result.shape
        assert torch.equal(result, result.round())
        assert result.abs().max() < 2**53
    operators = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert all(node.meta["stack_trace"] for node in operators)


@pytest.mark.examples(10)
@given(placement=placements_of(["0", "1", "2"]), data=st.data())
def test_a_users_model_does_not_depend_on_placement(placement, data):
    class WithLoss(nn.Sequential):
        def forward(self, x):
            return super().forward(x).square().mean()

    torch.manual_seed(0)
    model = WithLoss(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    options = data.draw(options_for(placement=placement))
    x = torch.randn(2 * micro_batches(options), 3)
    assert_same_training(placement.place(model), [x], options, loss=0)


@pytest.mark.slow
def test_comparisons_do_not_need_hypothesis():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from ipu_dynamo.testing import assert_same_training, Recipe\n"
        "r = Recipe()\n"
        "assert_same_training(r.build(), [r.data(1)], {'engine': 'eager'},"
        " loss=lambda out: out['loss'])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
