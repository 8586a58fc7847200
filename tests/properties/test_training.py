"""Check that training a drawn model as a program does what plain PyTorch does."""

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from ipu_dynamo.testing import BlockPlacement, options_for, recipes
from tests.properties.running import ENGINES, draw_placement, halves, train


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@given(recipe=recipes(), data=st.data())
def test_training_agrees_with_pytorch(engine, recipe, data):
    options = data.draw(options_for(engine=engine))
    train(recipe, BlockPlacement(), options)


@pytest.mark.parametrize("engine", ENGINES)
@given(recipe=recipes(exact=True), data=st.data())
def test_integers_are_trained_exactly(engine, recipe, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(engine=engine, placement=placement, exact=True))
    train(recipe, placement, options, optimizer=halves, steps=1, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
@given(recipe=recipes(), data=st.data())
def test_any_placement_agrees_with_pytorch(engine, recipe, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(engine=engine, placement=placement))
    program = train(recipe, placement, options).program
    note(program.short())
