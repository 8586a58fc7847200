"""Choose a floating-point type with enough digits to test a compiler by a drawn model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ipu_dynamo.testing.compare import assert_close
from ipu_dynamo.testing.recipe import Recipe


def with_enough_digits(recipe: Recipe, compute: Callable[[Recipe], Any]) -> Recipe:
    """`recipe`, or the same in float64 where float32 has too few digits for it.

    Gradients may cancel and training may magnify: then two orders of the same sum differ by more
    than `assert_close` allows, and neither is wrong. So a recipe keeps float32 only if rounding to
    float32 changes its results by at most a tenth of that. One drawn model in 20 changes type.

    Args:
        recipe: a drawn one.
        compute: returns the results of a recipe by a reference computation: plain PyTorch, or a
            program without the tested feature. It is called for both types.

    Example:
        @given(recipe=recipes())
        def test_my_pass(recipe):
            recipe = with_enough_digits(recipe, lambda r: r.build()(*r.data(1)))
    """
    if recipe.exact or recipe.dtype != torch.float32:
        return recipe
    wide = replace(recipe, dtype=torch.float64)
    try:
        assert_close(compute(recipe), compute(wide), rtol=1e-6, atol=1e-7, same_dtype=False)
    except AssertionError:
        return wide
    return recipe
