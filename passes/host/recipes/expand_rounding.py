"""Show Inductor how numbers are rounded at random, so that it does it in one loop with the rest.

Before   %y: f16[n] = ipu.round_stochastically(%x, %first, %second)
After    %index: i32[n] = aten.arange(n); ...; %y: f16[n] = aten._to_copy(%where, dtype=float16)
Keeps    bits, layouts, source lines.
Source   it is one operator until here: passes take time for each, and there are 40 of them.
"""

from dataclasses import replace

from torch import Tensor, fx

from ipu_dynamo.ops.precision.stochastic_rounding import (
    round_stochastically,
    round_stochastically_op,
)
from ipu_dynamo.passes.host.recipes.recipe_pass import RecipePass, Rewritten
from ipu_dynamo.passes.host.recipes.write_operators import written
from ipu_dynamo.program import Function, HostProgram, make_function
from ipu_dynamo.program.recipe import FunctionRecipe


def apply(function: Function) -> Function:
    """`function` with the operators that a rounding consists of."""
    graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in function.graph.graph.nodes:
        if node.target is round_stochastically_op:
            (rounded,) = written(graph, node, _round, node.all_input_nodes, of)
            assert rounded is not None
            of[node] = rounded
        else:
            of[node] = graph.node_copy(node, of.__getitem__)
    return make_function(function.name, fx.GraphModule(function.graph, graph))


def _round(x: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
    return [round_stochastically(x, first, second)]


class ExpandRounding(RecipePass):
    """The pass."""

    acts_on = (round_stochastically_op,)

    def rewrite(self, recipe: FunctionRecipe, host: HostProgram | None) -> Rewritten:
        graph = recipe.lowered.graph.graph
        if not graph.find_nodes(op="call_function", target=round_stochastically_op):
            return recipe, ()
        return replace(recipe, lowered=apply(recipe.lowered)), ()
