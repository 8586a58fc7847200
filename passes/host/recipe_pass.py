"""Rewrite recipes one by one: what passes on them have in common."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from ipu_dynamo.passes.levels import Level
from ipu_dynamo.program import Decision, HostProgram
from ipu_dynamo.program.recipe import Recipe

Rewritten = tuple[Recipe, Sequence[Decision]]


class RecipePass:
    """A pass that looks at each recipe of a function that is compiled by itself."""

    name: ClassVar[str]
    level: ClassVar[Level] = "host"

    @abstractmethod
    def rewrite(self, recipe: Recipe, host: HostProgram | None) -> Rewritten:
        """What becomes of a recipe, perhaps the same, and what was decided.

        Args:
            host: what calls the function, if that is known.
        """

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        recipes, decisions = dict(host.recipes), list[Decision]()
        for name, recipe in host.recipes.items():
            if recipe.engine == "inductor":
                recipes[name], made = self.rewrite(recipe, host)
                decisions += made
        unchanged = all(recipes[name] is recipe for name, recipe in host.recipes.items())
        if unchanged and not decisions:
            return False
        return replace(host, recipes=recipes).deciding(*decisions)
