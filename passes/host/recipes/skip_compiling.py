"""Run a function operator by operator if a compiler would generate no code of its own for it.

Before   recipe backward0: inductor, of %d = aten.mm(%a, %b) alone
After    recipe backward0: eager
Keeps    the function.
Source   Inductor calls libraries for matmuls; compiling such a call takes seconds and gains none.
"""

from dataclasses import replace

from torch import fx

from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.accumulate import accumulate_matmul, accumulate_rows
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import only_looks
from ipu_dynamo.passes.host.recipes.recipe_pass import RecipePass, Rewritten
from ipu_dynamo.program import Decision, HostProgram
from ipu_dynamo.program.recipe import FunctionRecipe

_MATMULS = {
    aten.addmm.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.mm.default,
    onednn.batched,
    onednn.matmul,
    onednn.packed,
    accumulate_matmul,
    accumulate_rows,
}


class SkipCompiling(RecipePass):
    """The pass. `forced`: whether to run all functions so, or none."""

    choices = (True, False)

    forced: bool | None = None

    def rewrite(self, recipe: FunctionRecipe, host: HostProgram | None) -> Rewritten:
        skipped, reason = self.forced, "it is forced"
        if skipped is None:
            skipped = not any(map(_worth_compiling, recipe.lowered.operators))
            reason = "Inductor would make no code of its own"
        if not skipped:
            return recipe, ()
        decision = Decision(self.name, "operator by operator", reason, recipe.function.name)
        return replace(recipe, engine="eager", settings=()), (decision,)


def _worth_compiling(node: fx.Node) -> bool:
    """Whether Inductor generates code for an operator, instead of a call to PyTorch."""
    return not only_looks(node) and node.target not in _MATMULS
