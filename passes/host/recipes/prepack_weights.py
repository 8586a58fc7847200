"""Keep weights of inference in the order of a library's own, where matmuls of them gain.

Before   %t = aten.t(%w);  %y = aten.mm(%x, %t), where %w keeps its values from call to call
After    %y = ipu.onednn_packed(%x, %w_packed), with a further input that the runtime packs once
Keeps    shapes, layouts, source lines; values but for the order of the sums.
Source   oneDNN developer guide, "Inner matmul": weights in a format that the library chooses.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.host.recipes.choose_matmuls import apply, choice_by, decisions_of, plan
from ipu_dynamo.passes.host.recipes.recipe_pass import RecipePass, Rewritten
from ipu_dynamo.program import Call, Function, HostProgram, Program
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.program.schedule.dependencies import changed_variables
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.tune.matmul_classes import MATMULS


class PrepackWeights(RecipePass):
    """The pass.

    Args:
        own_tensors: the version counter of a weight counts every write to it. A write through
            `weight.data` would not be counted.
        figures: to decide by; None: those of this machine.
        forced: whether to pack all weights where possible, regardless of the gain.
    """

    acts_on = MATMULS
    choices = (True, False)

    own_tensors: bool = False
    figures: Figures | None = None
    forced: bool | None = None

    def applies(self, host: HostProgram, contents: Contents) -> bool:
        return self.own_tensors and super().applies(host, contents)

    def rewrite(self, recipe: FunctionRecipe, host: HostProgram | None) -> Rewritten:
        if not self.own_tensors or host is None or self.forced is False:
            return recipe, ()
        program = host.runs
        constants = constant_inputs(recipe.function, program.calls, constant_variables(program))
        choice = choice_by(self.figures, "onednn" if self.forced else None)
        matmuls = plan(recipe.lowered.graph.graph, choice, constants)
        packed = [matmul for matmul in matmuls if matmul.way == "packed"]
        if not packed:
            return recipe, ()
        lowered, further = apply(recipe.lowered, packed)
        # Packed weights have no strides that could be asserted.
        settings = (*recipe.settings, ("size_asserts", False))
        name = recipe.function.name
        return (
            replace(recipe, lowered=lowered, packed=further, settings=settings),
            decisions_of(packed, choice, by=self.name, function=name),
        )


def constant_variables(program: Program) -> frozenset[str]:
    """The weights on the chips that `program` only reads."""
    changed = changed_variables(program)
    return frozenset(
        variable.name
        for variable in program.variables
        if program.kind == "inference" and variable.kind in ("parameter", "buffer")
        if not variable.off_chip and variable.name not in changed
    )


def constant_inputs(
    function: Function, calls: Sequence[Call], constants: Set[str]
) -> tuple[int, ...]:
    """Positions of the arguments that are constants in every call of a function."""
    arguments = [call.arguments for call in calls if call.function == function.name]
    columns = enumerate(zip(*arguments, strict=True))
    return tuple(i for i, names in columns if constants >= set(names))
