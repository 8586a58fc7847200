"""Test models and passes: random models, graphs and placements, and comparisons with PyTorch.

The comparisons need torch only; the strategies need hypothesis (extra `testing`)
and are loaded on first use.

Example:
    from ipu_dynamo.testing import assert_same_training

    assert_same_training(MyModel(), [(x, y)], {"gradient_accumulation": 4})
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipu_dynamo.testing.batchings import options_for
    from ipu_dynamo.testing.compare import (
        assert_close,
        assert_same_bits,
        assert_same_inference,
        assert_same_training,
    )
    from ipu_dynamo.testing.digits import with_enough_digits
    from ipu_dynamo.testing.graphs import aten_graphs
    from ipu_dynamo.testing.models import modules, recipes
    from ipu_dynamo.testing.placements import BlockAt, BlockPlacement, Placement, placements_of
    from ipu_dynamo.testing.recipe import Recipe, Step
    from ipu_dynamo.testing.reference import Reference

_NAMES_IN = {
    "batchings": ("options_for",),
    "compare": (
        "assert_close",
        "assert_same_bits",
        "assert_same_inference",
        "assert_same_training",
    ),
    "digits": ("with_enough_digits",),
    "graphs": ("aten_graphs",),
    "models": ("modules", "recipes"),
    "placements": ("BlockAt", "BlockPlacement", "Placement", "placements_of"),
    "recipe": ("Recipe", "Step"),
    "reference": ("Reference",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}
__all__ = [
    "BlockAt",
    "BlockPlacement",
    "Placement",
    "Recipe",
    "Reference",
    "Step",
    "assert_close",
    "assert_same_bits",
    "assert_same_inference",
    "assert_same_training",
    "aten_graphs",
    "modules",
    "options_for",
    "placements_of",
    "recipes",
    "with_enough_digits",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
