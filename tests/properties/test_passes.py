"""Check every pass: values, valid graphs and metadata are kept; a second run changes nothing."""

from itertools import takewhile

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.passes.pipeline import joint_passes
from ipu_dynamo.testing import assert_close, recipes
from tests.properties.evaluate import captured, check, evaluate, left_by, lines_of, named_inputs
from tests.properties.running import draw_placed

PASSES = [
    "Placement",
    "IdentityLoss",
    "NarrowTypes",
    "Differentiate",
    "SerializeLoss",
    "SerializeMatmul",
    "AssignGradientStages",
    "Recompute",
    "DropSameViews",
]


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.quick(8)
@given(recipe=recipes(), training=st.booleans(), data=st.data())
def test_a_pass_keeps_values_and_metadata(name, recipe, training, data):
    model, options = draw_placed(data, recipe, training=training)
    batch = recipe.data(1)
    inputs = named_inputs(model, batch)
    capture, one = captured(model, batch, options, training=training, before=name)
    before, nodes = evaluate(capture, inputs), list(capture.graph.graph.nodes)
    capture = left_by(one, capture)
    if name == "Differentiate":  # what it leaves is functional and begins by itself after these
        for step in takewhile(lambda step: step.name != "SerializeLoss", joint_passes(options)):
            step(capture)
    note(str(capture.graph.graph))
    check(capture)
    after = evaluate(capture, inputs)
    common = before.keys() & after.keys()
    assert {key for key in before if key.startswith(("value", "final"))} <= common
    if capture.training and name not in ("Placement", "IdentityLoss"):
        assert any(key.startswith("gradient") for key in common)
    assert_close({key: after[key] for key in common}, {key: before[key] for key in common})
    assert lines_of(capture.graph.graph.nodes) <= lines_of(nodes)
    operators = [n for n in capture.graph.graph.nodes if n.op == "call_function"]
    assert all(n.meta.get("stack_trace") for n in operators if n.all_input_nodes)
    if name != "Differentiate":
        text = write_level(capture)
        assert not one(capture)
        assert write_level(capture) == text
