"""Check that right programs of drawn and well-known models have no difference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo import Options, bisect
from ipu_dynamo.testing import options_for, recipes
from tests import models
from tests.properties.running import draw_placement


@pytest.mark.examples(4)
@given(recipe=recipes(), data=st.data())
def test_drawn_training_steps_have_no_difference(tmp_path_factory, recipe, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(engine="eager", placement=placement))
    model = placement.place(recipe.build())
    path = tmp_path_factory.mktemp("bisect") / "repro.py"
    settings = {"options": options, "rtol": 1e-3, "repro": path}
    found = bisect(model, *recipe.data(1, seed=0), training=True, **settings)
    assert found is None, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("case", models.CASES, ids=lambda case: case.name)
def test_well_known_models_have_no_difference(case, tmp_path):
    model, batch = case.build()
    case.place(model, 2)
    options, path = Options("eager"), tmp_path / "repro.py"
    found = bisect(model, kwargs=batch, training=True, options=options, repro=path)
    assert found is None, str(found)
