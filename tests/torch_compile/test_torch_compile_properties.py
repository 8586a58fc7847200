"""Check that drawn models compute and train through torch.compile as plain PyTorch does."""

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor

import ipu_dynamo
from ipu_dynamo.testing import assert_close, placements_of, recipes, with_enough_digits
from ipu_dynamo.testing.private.testing_names import pytree
from ipu_dynamo.torch_compile.backend import ipu

ENGINES = ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]


def run(model, call, recipe, *, training: bool, micro_batches: int = 1) -> list[Tensor]:
    """Everything that two calls leave behind: results, changed inputs, gradients, buffers."""
    left = []
    for seed in range(2):
        inputs = recipe.data(micro_batches, seed)
        with torch.set_grad_enabled(training):
            results = call(*inputs)
        if training:
            results["loss"].sum().backward()
        left += [leaf.detach() for leaf in pytree.tree_leaves((results, inputs)) if holds(leaf)]
    # Where only an output that nobody differentiates needs a weight, AOTAutograd gives zeros.
    left += [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return left + list(model.buffers())


def in_pytorch(recipe, *, training: bool) -> list[Tensor]:
    """What two calls leave behind in plain PyTorch."""
    plain = recipe.build()
    return run(plain, plain, recipe, training=training)


def holds(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.examples(200)
@pytest.mark.quick(8)
@given(recipe=recipes(), data=st.data())
def test_agrees_with_pytorch(engine, training, recipe, data):
    placement = data.draw(placements_of(recipe.build().names, kinds=("sharded",)))
    recipe = with_enough_digits(recipe, lambda one: in_pytorch(one, training=training))
    expected = in_pytorch(recipe, training=training)
    torch._dynamo.reset()
    model = placement.place(recipe.build())
    recompute = data.draw(st.sampled_from(("cheap", "off")))
    options = {"engine": engine, "strategy": placement.strategy, "recompute": recompute}
    call = torch.compile(model, backend=ipu, fullgraph=True, options=options)
    with torch._dynamo.config.patch(allow_rnn=True):
        found = run(model, call, recipe, training=training)
    for program in ipu_dynamo.programs():
        note(program.short())
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype
        assert_close(one, other, f"tensor {i}")
