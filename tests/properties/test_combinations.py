"""Check that all that saves memory, in any combination, leaves training as it is without."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from ipu_dynamo import Locations, Strategy, recomputation_checkpoint
from ipu_dynamo.testing import (
    BlockPlacement,
    assert_close,
    assert_same_bits,
    options_for,
    recipes,
    with_enough_digits,
)
from ipu_dynamo.testing.kinds import KINDS
from ipu_dynamo.testing.recipe import Step
from tests.properties.running import EAGER_FIRST_OF_SEVERAL, draw_placement, outcome

# Options of the core: what is drawn of each, beside strategy and locations, and what is plain.
DRAWN = {
    "recompute": (st.sampled_from(["auto", "off", "stages", "all"]), "off"),
    "outline": (st.sampled_from(["auto", True, False]), False),
    "workers": (st.sampled_from([1, 2, 4]), 1),
}
PLAIN = {name: plain for name, (_, plain) in DRAWN.items()}
SERIALIZED = ["serialized_rows", "serialized_sum", "serialized_columns"]


@dataclass(frozen=True)
class Rewritten:
    """Where a model's blocks begin, which products are in parts, and which results are kept.

    Args:
        serialized: a kind of layer, as which all products with an embedding's matrix are computed.
        marked: layers whose results are marked for recomputation.
    """

    placement: BlockPlacement
    serialized: str | None
    marked: tuple[str, ...]

    def place(self, model):
        for layer in model.layers:
            if self.serialized and layer.step.kind == "unembedding":
                layer.run = KINDS[self.serialized].run
        for name in self.marked:
            layer = model.get_submodule(name)
            layer.register_forward_hook(lambda layer, args, y: recomputation_checkpoint(y))
        return self.placement.place(model)


@st.composite
def rewritten(draw, recipe, data):
    """A way to run `recipe` with less memory."""
    names = recipe.build().names
    return Rewritten(
        draw_placement(data, recipe),
        draw(st.sampled_from([None, *SERIALIZED])),
        tuple(draw(st.lists(st.sampled_from(names), unique=True, max_size=3))),
    )


@pytest.mark.filterwarnings("ignore:recompute_budget")
@pytest.mark.parametrize("engine", EAGER_FIRST_OF_SEVERAL)
@pytest.mark.examples(500)
@given(recipe=recipes(random=True), data=st.data())
def test_what_saves_memory_changes_no_result_in_any_combination(engine, recipe, data):
    """Three steps give the same losses, weights and states as on one IPU that keeps everything.

    A product in parts adds up in another order, and Inductor fuses what one function holds; so does
    oneDNN with an LSTM layer whose gradients are in its function, which is left out.
    """
    recipe = replace(recipe, steps=(*recipe.steps, Step("unembedding", shares="tied")))
    model = data.draw(rewritten(recipe, data))
    options = replace(
        data.draw(options_for(engine=engine, placement=model.placement)),
        seed=7,
        without=("CallOnednnLstms",),
        **data.draw(st.fixed_dictionaries({name: drawn for name, (drawn, _) in DRAWN.items()})),
    )
    if options.recompute in ("auto", "all"):
        budget = data.draw(st.none() | st.integers(1, 4096))
        options = replace(options, recompute_budget=budget)
    plain = replace(options, recompute_budget=None, locations=Locations(), strategy=Strategy())
    plain = replace(plain, **PLAIN)
    same_bits = engine == "eager" and not model.serialized
    if not same_bits:
        as_written = replace(plain, engine="eager")
        recipe = with_enough_digits(
            recipe, lambda one: outcome(one, BlockPlacement(), as_written, count=3)
        )
    note(f"{recipe}\n{model}\n{options}")
    expected = outcome(recipe, BlockPlacement(), plain, count=3)
    found = outcome(recipe, model, options, count=3)
    (assert_same_bits if same_bits else assert_close)(found, expected)
