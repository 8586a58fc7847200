"""Check that anchors show what is inside drawn models, and change nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo import compile_inference, compile_training
from ipu_dynamo.options import Anchor
from ipu_dynamo.testing import assert_close, assert_same_bits, options_for, recipes
from tests.properties.running import EAGER_FIRST_OF_SEVERAL, calls, draw_placement, outcome, slow
from tests.properties.test_sameness import in_enough_digits


def compiled(recipe, placement, options, *, training):
    """A program of a drawn model after a call."""
    model = placement.place(recipe.build())
    program = (
        compile_training(model, slow(model), options)
        if training
        else compile_inference(model, options)
    )
    program(*calls(recipe, options, training=training, count=1)[0])
    return program


def everything(names, draw):
    """An anchor of each value, gradient and update."""
    kinds = {
        "value": (*names.variables, *names.inputs, *names.operators),
        "gradient": names.gradients,
        "update": names.updates,
    }
    rules = st.sampled_from(["all", "final", "sum"])
    return {
        f"{of} of {name}": Anchor(name, of, draw(rules))
        for of, known in kinds.items()
        for name in known
    }


@pytest.mark.parametrize("engine", EAGER_FIRST_OF_SEVERAL)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_anchoring_everything_changes_no_other_bit(engine, recipe, training, data):
    """Inductor fuses what one function holds, so what is returned beside moves its roundings."""
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(engine=engine, placement=placement, training=training))
    options = replace(options, seed=7)
    names = compiled(recipe, placement, options, training=training).value_names
    anchored = replace(options, anchors=everything(names, data.draw))
    if engine != "eager":
        recipe = in_enough_digits(recipe, options, training=training)
    plain, looked_at = (
        outcome(recipe, placement, one, training=training) for one in (options, anchored)
    )
    (assert_same_bits if engine == "eager" else assert_close)(looked_at, plain)
