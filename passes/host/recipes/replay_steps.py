"""Repeat a fused step of few elements without Python: kernels and matmuls one after the other.

Before   FunctionRecipe(@whole_step0)
After    FunctionRecipe(@whole_step0, replays=True, overwrites=(0, 1)): the runtime records
         what its code calls, and repeats it; new values of states 0 and 1 take the memory of the
         old ones
Keeps    values but for the order of sums in matmuls. Where the code calls something else than
         kernels and small matmuls, it runs as without this pass; the printed plan says why. The
         model's own tensors are never overwritten: the first step of a call writes elsewhere.
Source   our own; CUDA graphs do this for devices.
"""

from dataclasses import replace

from torch import fx

from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.host.recipes.overwritten_states import overwritten_states
from ipu_dynamo.passes.host.recipes.recipe_pass import RecipePass, Rewritten
from ipu_dynamo.program import Decision, HostProgram
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.tune.costs import SMALL_MATMUL
from ipu_dynamo.tune.matmul_classes import MATMULS, operations


def largest_matmul(graph: fx.Graph) -> int:
    """Operations of the largest matmul of a graph."""
    return max((operations(node) for node in graph.nodes if node.target in MATMULS), default=0)


class ReplaySteps(RecipePass):
    """The pass. `forced`: False, if steps must not be repeated, regardless of the gain."""

    choices = (False,)

    forced: bool | None = None

    def applies(self, host: HostProgram, contents: Contents) -> bool:
        return host.fused is not None and super().applies(host, contents)

    def rewrite(self, recipe: FunctionRecipe, host: HostProgram | None) -> Rewritten:
        fused = host.fused if host is not None else None
        if fused is None or recipe.function is not fused.function:
            return recipe, ()
        graph = recipe.lowered.graph.graph
        largest = largest_matmul(graph)
        if self.forced is False:
            repeats, reason = False, "it is forced"
        else:
            repeats = largest < SMALL_MATMUL
            reason = f"{largest} operations in its largest matmul"
        choice = "repeated" if repeats else "called"
        decision = Decision(self.name, choice, reason, recipe.function.name)
        overwrites = overwritten_states(graph, len(fused.state)) if repeats else ()
        return replace(recipe, replays=repeats, overwrites=overwrites), [decision]
