"""Check that training a drawn model as a program does what plain PyTorch does."""

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from ipu_dynamo.testing import (
    Placement,
    assert_same_training,
    options_for,
    placements_of,
    recipes,
)
from ipu_dynamo.testing.batchings import micro_batches

ENGINES = [
    pytest.param("eager"),
    pytest.param("inductor", marks=pytest.mark.inductor),
]


def halves(model):
    """An optimiser that keeps small integers exact for one update."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def train(recipe, placement, options, **settings):
    data = [recipe.data(micro_batches(options), seed=call) for call in range(2)]
    return assert_same_training(
        placement.place(recipe.build()), data, options, loss=lambda r: r["loss"], **settings
    )


@pytest.mark.parametrize("engine", ENGINES)
@given(recipe=recipes(), data=st.data())
def test_training_agrees_with_pytorch(engine, recipe, data):
    options = data.draw(options_for(engine=engine))
    train(recipe, Placement(), options)


@pytest.mark.parametrize("engine", ENGINES)
@given(recipe=recipes(exact=True), data=st.data())
def test_integers_are_trained_exactly(engine, recipe, data):
    options = data.draw(options_for(engine=engine, exact=True))
    train(recipe, Placement(), options, optimizer=halves, steps=1, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
@given(recipe=recipes(), data=st.data())
def test_any_placement_agrees_with_pytorch(engine, recipe, data):
    placement = data.draw(placements_of(recipe.build().names))
    options = data.draw(options_for(engine=engine, placement=placement))
    program = train(recipe, placement, options).program
    note(program.short())
