"""Check what must not matter: the run, the engine, the placement, the number of workers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.options import Strategy
from ipu_dynamo.testing import (
    BlockPlacement,
    assert_close,
    assert_same_bits,
    options_for,
    recipes,
    with_enough_digits,
)
from ipu_dynamo.testing.kinds import KINDS
from tests.properties.running import ENGINES_OF_SEVERAL, draw_placement, outcome

NOWHERE = BlockPlacement()


def in_enough_digits(recipe, options, **settings):
    """`recipe`, in float64 where rounding counts, on one IPU of the eager engine."""
    alone = replace(options, engine="eager", seed=7, strategy=Strategy())
    return with_enough_digits(recipe, lambda one: outcome(one, NOWHERE, alone, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES_OF_SEVERAL)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_two_runs_give_the_same_bits(engine, recipe, training, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(engine=engine, placement=placement, training=training))
    options = replace(options, seed=7)
    first, second = (outcome(recipe, placement, options, training=training) for _ in range(2))
    assert_same_bits(first, second)


@pytest.mark.parametrize("engine", ENGINES_OF_SEVERAL)
@pytest.mark.examples(500)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_strategy_and_workers_change_no_bit(engine, recipe, training, data):
    """Three steps in any placement, by any strategy, on 1, 2 or 4 workers, are those of one IPU.

    Inductor fuses what one function holds, so cutting moves its roundings.
    """
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(engine=engine, placement=placement, training=training))
    counts = data.draw(st.permutations([1, 2, 4]))[:2]
    if engine != "eager":
        recipe = in_enough_digits(recipe, options, training=training, count=3)
    placed, again = (
        outcome(recipe, placement, replace(options, seed=7, workers=n), training=training, count=3)
        for n in counts
    )
    assert_same_bits(again, placed)
    options = replace(options, seed=7, strategy=Strategy())
    alone = outcome(recipe, NOWHERE, options, training=training, count=3)
    (assert_same_bits if engine == "eager" else assert_close)(placed, alone)


@pytest.mark.parametrize("engine", ENGINES_OF_SEVERAL)
@pytest.mark.examples(500)
@given(recipe=recipes(exact=True), training=st.booleans(), data=st.data())
def test_exact_sums_are_the_bits_of_one_ipu(engine, recipe, training, data):
    placement = draw_placement(data, recipe)
    options = data.draw(
        options_for(engine=engine, placement=placement, training=training, exact=True)
    )
    workers = data.draw(st.sampled_from([1, 2, 4]))
    placed = outcome(recipe, placement, replace(options, workers=workers), training=training)
    options = replace(options, strategy=Strategy())
    assert_close(placed, outcome(recipe, NOWHERE, options, training=training), rtol=0, atol=0)


@pytest.mark.quick(8)
@given(
    recipe=recipes(dtypes=[torch.float32], kinds=KINDS.keys() - {"count", "batch_norm"}),
    training=st.booleans(),
    data=st.data(),
)
def test_narrow_integers_change_no_number(recipe, training, data):
    """Narrow integers hold what the models count, but a program cannot change integer buffers."""
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement, training=training))
    wide = outcome(recipe, placement, options, training=training)
    narrow = outcome(recipe, placement, replace(options, narrow=True), training=training)
    assert_close(narrow, wide, same_dtype=False)


@pytest.mark.slow
@pytest.mark.inductor
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_engines_agree(recipe, training, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement, training=training))
    options = replace(options, seed=7)
    recipe = in_enough_digits(recipe, options, training=training)
    eager = outcome(recipe, placement, options, training=training)
    compiled = outcome(recipe, placement, replace(options, engine="inductor"), training=training)
    assert_close(compiled, eager)


@pytest.mark.inductor
@given(recipe=recipes(exact=True), training=st.booleans(), data=st.data())
def test_engines_agree_exactly_on_integers(recipe, training, data):
    options = data.draw(options_for(training=training, exact=True))
    eager = outcome(recipe, NOWHERE, options, training=training)
    compiled = outcome(recipe, NOWHERE, replace(options, engine="inductor"), training=training)
    assert_close(compiled, eager, rtol=0, atol=0)
