"""Begin the recipes of all functions: the engine, and the number of threads.

Before   HostProgram(recipes={})
After    HostProgram(
             recipes={"forward0": FunctionRecipe(@forward0, @forward0, "inductor", threads=1)})
Keeps    everything else; later passes change what is `lowered` of a recipe.
Source   the split of deciding and running of this project's design.
"""

from dataclasses import replace
from typing import Literal

from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import RECOMPUTED, Function, HostProgram, make_function
from ipu_dynamo.program.recipe import FunctionRecipe


class MakeRecipes(Pass):
    """The pass. `compiles`: functions are compiled, and not run operator by operator."""

    level = "host"
    needed = "engines run recipes"

    compiles: bool = False

    def __call__(self, host: HostProgram) -> HostProgram:
        recipes = {f.name: self.recipe(f, host.threads) for f in host.functions}
        return replace(host, recipes=recipes)

    def recipe(self, function: Function, threads: int | None = None) -> FunctionRecipe:
        """The recipe of a function as it is."""
        engine: Literal["inductor", "eager"] = "inductor" if self.compiles else "eager"
        return FunctionRecipe(
            function,
            function,
            engine,
            threads,
            written=function.written,
            releases=any(node.meta.get(RECOMPUTED) for node in function.operators),
            bodies=tuple(self.recipe(body, threads) for body in run_by(function)),
            settings=_settings(threads) if self.compiles else (),
        )


def run_by(function: Function) -> tuple[Function, ...]:
    """The bodies of a function's own loops and branches, each once."""
    bodies = (body for node in function.operators for body in bodies_of(node))
    return tuple({body.name: make_function(body.name, body.graph) for body in bodies}.values())


def _settings(threads: int | None) -> tuple[tuple[str, bool | int], ...]:
    """Return Inductor's settings for a function.

    Half-precision results are rounded after every operator, also inside a fused kernel. So they
    equal those of the eager engine.
    """
    settings: dict[str, bool | int] = {"emulate_precision_casts": True, "fallback_random": True}
    if threads is not None:
        settings["cpp.threads"] = threads
    return tuple(settings.items())
