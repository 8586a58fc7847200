"""Rewrite recipes one by one: the shared part of passes on them."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import Decision, HostProgram
from ipu_dynamo.program.recipe import FunctionRecipe

Rewritten = tuple[FunctionRecipe, Sequence[Decision]]


class RecipePass(Pass):
    """A pass that looks at each recipe of a function that is compiled by itself."""

    level = "host"

    def applies(self, host: HostProgram, contents: Contents) -> bool:
        return any(map(_compiles, host.recipes.values())) and super().applies(host, contents)

    @abstractmethod
    def rewrite(self, recipe: FunctionRecipe, host: HostProgram | None) -> Rewritten:
        """Return the new recipe, or the same one, and the decisions.

        Args:
            host: the caller of the function, if it is known.
        """

    def with_bodies(self, recipe: FunctionRecipe, host: HostProgram | None) -> Rewritten:
        """Rewrite a recipe, and those of the bodies that it runs."""
        rewritten = [self.with_bodies(body, host) for body in recipe.bodies]
        decisions = [decision for _, decided in rewritten for decision in decided]
        bodies = tuple(body for body, _ in rewritten)
        if any(new is not old for new, old in zip(bodies, recipe.bodies, strict=True)):
            recipe = replace(recipe, bodies=bodies)
        if recipe.engine != "inductor":
            return recipe, decisions
        recipe, own = self.rewrite(recipe, host)
        return recipe, [*decisions, *own]

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        recipes, decisions = dict(host.recipes), list[Decision]()
        for name, recipe in host.recipes.items():
            recipes[name], decided = self.with_bodies(recipe, host)
            decisions += decided
        unchanged = all(recipes[name] is recipe for name, recipe in host.recipes.items())
        if unchanged and not decisions:
            return False
        return replace(host, recipes=recipes).deciding(*decisions)


def _compiles(recipe: FunctionRecipe) -> bool:
    """Whether a function or one of its bodies is compiled."""
    return recipe.engine == "inductor" or any(map(_compiles, recipe.bodies))
