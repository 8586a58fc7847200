"""Find counters, states of parameters and other states, in all steps of an optimiser.

Before   graphs of tensors, whose inputs are leaves of the optimiser by path
After    the same with an `UpdatePlan`, which names counters, states and hyperparameters
Keeps    the graphs.
Source   a program's variables: what lasts from step to step, and where it is.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.update.world import Leaf, World
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update.expand_representatives import plan_of
from ipu_dynamo.passes.update.share_counters import alike_counters
from ipu_dynamo.passes.update.step_graphs import is_number, numbers_without_tensors
from ipu_dynamo.passes.update_levels import PlannedState, UpdateGraphs, UpdatePlan, UpdateStep
from ipu_dynamo.program.ir import made_names
from ipu_dynamo.program.ir.traced_update import Counter
from ipu_dynamo.program.ir.types import TensorType


def _plan(last: UpdateStep, epochs: int, first: World) -> UpdatePlan:
    """Plan from the step that has all counters and states.

    Args:
        first: the state before the first step.
    """
    world, inputs, after, leaves = last.world, last.inputs, last.after, last.leaves
    numbers = numbers_without_tensors(last)
    known = {leaf.path: leaf for leaf in first.leaves}
    counters, hyperparameters = {}, []
    for path, leaf in inputs.items():
        changed = after.get(path) is not leaves[path]
        if path in numbers and (changed or leaf.parameter is not None or path not in known):
            counters[path] = _counter(leaf, world.names)
        elif path in numbers:
            hyperparameters.append(path)
    for paths in alike_counters(world):
        own = [path for path in paths if path in counters]
        if len({after[path] for path in own}) == 1:
            leaf = inputs[own[0]]
            shared = _counter(replace(leaf, parameter=None), world.names)
            counters |= dict.fromkeys(own, shared)
    counters = {path: _beginning(c, known.get(path)) for path, c in counters.items()}
    kept = [path for path in inputs if path not in numbers]
    states, others = _states(last, kept)
    return UpdatePlan(states, others, counters, epochs, tuple(hyperparameters))


def _states(
    last: UpdateStep, paths: Sequence[str]
) -> tuple[tuple[tuple[PlannedState, ...], ...], tuple[PlannedState, ...]]:
    """Return the states of each parameter, and those of no parameter."""
    world, inputs = last.world, last.inputs
    free = [path for path in paths if inputs[path].parameter is None]
    owners = _owners_of_states(last, free)
    own: list[list[PlannedState]] = [[] for _ in world.parameters]
    shared: list[PlannedState] = []
    for path in paths:
        leaf = inputs[path]
        owner = leaf.parameter if leaf.parameter is not None else owners.get(path)
        if owner is None or leaf.is_number:
            shared.append(PlannedState(path, _variable(leaf, world.names), _type(leaf)))
        else:
            own[owner].append(PlannedState(path, leaf.key, _type(leaf)))
    short = [
        [replace(state, key=state.key.removeprefix(f"{name}.")) for state in of]
        for name, of in zip(world.names, own, strict=True)
    ]
    if free and len({tuple(state.key for state in of) for of in short}) > 1:
        short = [[replace(s, key=f"state{i}") for i, s in enumerate(of)] for of in own]
    return tuple(map(tuple, short)), tuple(shared)


def _owners_of_states(step: UpdateStep, paths: Collection[str]) -> dict[str, int]:
    """Find the parameters of the states that the optimiser keeps under no parameter.

    A state is a parameter's if no result that depends on it depends on another parameter's
    tensors. Dependencies through tensors of no dimensions do not count.
    """
    leaves = step.leaves
    sources = {leaves[path]: path for path in paths if path in leaves}
    own: dict[fx.Node, int] = {}
    for place, pair in enumerate(zip(step.parameters, step.gradients, strict=True)):
        own |= dict.fromkeys(pair, place)
    for path, leaf in step.inputs.items():
        if leaf.parameter is not None:
            own[leaves[path]] = leaf.parameter
    reached: dict[fx.Node, frozenset[fx.Node]] = {}
    meets: dict[fx.Node, set[int]] = {source: set() for source in sources}
    for node in step.graph.graph.nodes:
        if node in own or node in sources:
            reached[node] = frozenset((node,)) if not is_number(node) else frozenset()
            continue
        if is_number(node) or node.op == "output":
            reached[node] = frozenset()
            continue
        reached[node] = frozenset().union(*(reached[s] for s in node.all_input_nodes))
        parameters = {own[source] for source in reached[node] if source in own}
        for source in reached[node]:
            if source in meets:
                meets[source] |= parameters
    return {sources[s]: next(iter(of)) for s, of in meets.items() if len(of) == 1}


def _variable(leaf: Leaf, names: Sequence[str]) -> str:
    if leaf.parameter is not None:
        return made_names.state(names[leaf.parameter], leaf.key)
    owner = "optimizer" if leaf.group is None else f"group{leaf.group}"
    return made_names.alone(f"{owner}.{leaf.key}")


def _type(leaf: Leaf) -> TensorType:
    if leaf.is_tensor:
        return TensorType.of(leaf.value)
    return TensorType(torch.float64 if type(leaf.value) is float else torch.int64, ())


def _counter(leaf: Leaf, names: Sequence[str]) -> Counter:
    value: Any = leaf.value.item() if leaf.is_tensor else leaf.value
    return Counter(_variable(leaf, names), _type(leaf), value)


def _beginning(counter: Counter, leaf: Leaf | None) -> Counter:
    """A counter with the value that it has before the first step; 0 where it is not there yet."""
    if leaf is None:
        return replace(counter, initial=0)
    return replace(counter, initial=leaf.value.item() if leaf.is_tensor else leaf.value)


class PlanUpdate(Pass):
    """The pass.

    Args:
        known: the plan of all the optimiser's parameters, from steps that were traced before.
    """

    known: UpdatePlan | None = None
    level = "update"
    needed = "it says what the program keeps from step to step"

    def __call__(self, update: UpdateGraphs) -> bool:
        if update.plan is not None:
            return False
        last = update.steps[-1]
        if self.known is None:
            update.plan = _plan(last, len(update.steps) - 1, update.steps[0].world)
        else:
            traced = list(dict.fromkeys(update.stands))
            update.plan = plan_of(self.known, update.worlds[-1], last.world, traced)
        return True
