"""Draw random models: branches, skips, shared weights, in-place changes, buffers, nested data."""

from collections.abc import Collection
from dataclasses import replace

import torch
from hypothesis import assume
from hypothesis import strategies as st

from ipu_dynamo.testing.kinds import KINDS
from ipu_dynamo.testing.recipe import EXACT_LOSSES, LOSSES, RETURNS, Drawn, Recipe, Step

# Discontinuous, or rounded to few digits: a difference in the last bit can become a large one.
SENSITIVE = frozenset({"compare", "half", "look_up_largest", "autocast"})


@st.composite
def recipes(
    draw: st.DrawFn,
    *,
    max_steps: int = 6,
    max_width: int = 4,
    max_rows: int = 3,
    exact: bool = False,
    training: bool = True,
    random: bool = False,
    kinds: Collection[str] | None = None,
    dtypes: Collection[torch.dtype] = (torch.float32, torch.float64),
) -> Recipe:
    """Descriptions of models; `build()` makes the model, `data(n)` the arguments of a call.

    They shrink towards few layers that read the one before.

    Args:
        max_steps: most layers.
        max_width: most features.
        max_rows: most rows of a micro-batch.
        exact: draw models and data in small integers and float32. All orders of summation then
            give the same bits, in forward, backward, and one update by a power of two.
        training: whether plain PyTorch must be able to differentiate the model.
        random: draw layers with random numbers too, whose results differ from plain PyTorch's.
        kinds: the kinds of layers to choose from; None: all that fit.
        dtypes: of the model; `exact` ones are float32.

    Example:
        @given(recipe=recipes(max_steps=3))
        def test_my_pass(recipe):
            model, data = recipe.build(), recipe.data(micro_batches=2)
    """
    allowed = [
        name
        for name, kind in KINDS.items()
        if (kind.exact if exact else name not in SENSITIVE) and (random or not kind.random)
    ]
    if kinds is not None:
        allowed = [name for name in allowed if name in kinds]
    step = st.builds(
        Step,
        kind=st.sampled_from(allowed),
        x=st.integers(0, 3),
        y=st.integers(0, max_steps),
        shares=st.sampled_from(["own", "tied", "module"]),
    )
    losses = EXACT_LOSSES if exact else tuple(LOSSES)
    recipe = Recipe(
        steps=tuple(draw(st.lists(step, max_size=max_steps))),
        width=draw(st.integers(1, max_width)),
        rows=draw(st.integers(2, max_rows)),
        inputs=draw(st.integers(1, 3)),
        losses=tuple(draw(st.lists(st.sampled_from(losses), min_size=1, max_size=3))),
        returns=tuple(draw(st.lists(st.sampled_from(list(RETURNS)), max_size=3))),
        dtype=torch.float32 if exact else draw(st.sampled_from(list(dtypes))),
        exact=exact,
        evaluate=draw(st.booleans()),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    if any(one.kind == "change" for one in recipe.steps):
        # An LSTM's backward pass reads its result in float64, and in float32 it may not.
        wide = replace(recipe, dtype=torch.float64)
        assume(recipe.runs(training=training) and wide.runs(training=training))
    return recipe


def modules(
    *,
    max_steps: int = 6,
    max_width: int = 4,
    max_rows: int = 3,
    exact: bool = False,
    training: bool = True,
) -> st.SearchStrategy[Drawn]:
    """Models of `recipes`, ready to be called; `model.recipe.data(n)` makes arguments.

    Args:
        max_steps: as for `recipes`.
        max_width: as for `recipes`.
        max_rows: as for `recipes`.
        exact: as for `recipes`.
        training: as for `recipes`.
    """
    drawn = recipes(
        max_steps=max_steps,
        max_width=max_width,
        max_rows=max_rows,
        exact=exact,
        training=training,
    )
    return drawn.map(Recipe.build)
