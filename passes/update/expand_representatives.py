"""Update all parameters as those that were traced for them.

Before   functions {a.weight: piece, a.bias: piece2}
After    functions {a.weight: piece, b.weight: piece, a.bias: piece2, b.bias: piece2}
Keeps    functions, numbers and counters. The step does the same with each parameter as with the one
         that was traced for it, which `capture/update/representatives.py` has checked.
Source   models with hundreds of parameters of few shapes.
"""

from collections.abc import Sequence
from dataclasses import replace

from ipu_dynamo.capture.update.representatives import places
from ipu_dynamo.capture.update.world import World
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update_levels import UpdateFunctions, UpdatePlan
from ipu_dynamo.program.ir.traced_update import TracedStep


def plan_of(common: UpdatePlan, source: World, target: World, of: Sequence[int]) -> UpdatePlan:
    """Translate the plan of `source` to another world.

    `of` has for each of its parameters the index of the representative in `source`.
    """
    if source is target:
        return common
    key = {leaf.path: leaf.key for leaf in source.leaves}
    path = {(leaf.parameter, leaf.key): leaf.path for leaf in source.leaves}
    own_path = {(leaf.parameter, leaf.key): leaf.path for leaf in target.leaves}
    states = tuple(
        tuple(replace(s, path=own_path[place, key[s.path]]) for s in common.states[there])
        for place, there in enumerate(of)
    )
    counters = {}
    for leaf in target.leaves:
        there = None if leaf.parameter is None else of[leaf.parameter]
        counter = common.counters.get(path.get((there, leaf.key), ""))
        if leaf.parameter is None:
            counter = common.counters.get(leaf.path)
        if counter is not None:
            counters[leaf.path] = counter
    return replace(common, states=states, counters=counters)


def _step_for_all(step: TracedStep, world: World, stands: Sequence[int]) -> TracedStep:
    """Expand the step of representatives to all the parameters that they represent."""
    of = {name: world.names[traced] for name, traced in zip(world.names, stands, strict=True)}
    return replace(
        step,
        functions={name: step.functions[traced] for name, traced in of.items()},
        states={name: step.states[traced] for name, traced in of.items()},
        arguments={name: step.arguments[traced] for name, traced in of.items()},
    )


class ExpandRepresentatives(Pass):
    """The pass."""

    level = "functions"
    needed = "parameters that were not traced would stay as they are"

    def __call__(self, update: UpdateFunctions) -> UpdateFunctions | bool:
        last, stands = update.worlds[-1], update.stands
        if update.traced is last:
            return False
        return replace(
            update,
            plan=plan_of(update.plan, update.traced, last, places(stands)),
            steps=tuple(_step_for_all(step, last, stands) for step in update.steps),
            traced=last,
        )
