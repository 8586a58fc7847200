"""Check that a drawn model's forward pass as a program computes what plain PyTorch does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.testing import options_for, recipes
from tests.properties.running import ENGINES, draw_placement, infer


@pytest.mark.parametrize("engine", ENGINES)
@given(recipe=recipes(training=False), data=st.data())
def test_inference_agrees_with_pytorch(engine, recipe, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(engine=engine, placement=placement, training=False))
    infer(recipe, placement, options)


@pytest.mark.parametrize("engine", ENGINES)
@given(recipe=recipes(exact=True, training=False), data=st.data())
def test_integers_are_inferred_exactly(engine, recipe, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(engine=engine, placement=placement, training=False, exact=True))
    infer(recipe, placement, options, rtol=0, atol=0)
