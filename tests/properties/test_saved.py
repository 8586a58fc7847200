"""Check that a saved program goes on with the bits of one that did not stop."""

import copy
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo import compile_inference, compile_training, load, save
from ipu_dynamo.testing import assert_same_bits, options_for, recipes
from tests.properties.running import calls, draw_placement, slow


@pytest.mark.examples(12)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_goes_on_with_the_same_bits(recipe, training, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement, training=training))
    model = placement.place(recipe.build())
    own = data.draw(st.booleans()) and not training
    if training:
        run = compile_training(model, slow(model), options)
    else:
        run = compile_inference(model, options, own_weights=own)
    batches = calls(recipe, options, training=training)
    run(*copy.deepcopy(batches[0]))
    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder, "saved"), Path(folder, "again")
        save(run, path)
        loaded = load(path)
        save(loaded, again)
        assert path.read_bytes() == again.read_bytes()
    for args in (batches[1], batches[0]):
        expected = run(*copy.deepcopy(args))
        assert_same_bits(loaded(*copy.deepcopy(args)), expected)
    if not own:
        weights = model.state_dict()
        assert loaded.state_dict().keys() == weights.keys()
        assert_same_bits(loaded.state_dict(), dict(weights))
    assert loaded.program == run.program
