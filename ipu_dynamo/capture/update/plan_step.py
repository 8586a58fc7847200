"""Say what is a counter, a parameter's state, or a state of none, in all variants of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.update.coupling import owners_of_states
from ipu_dynamo.capture.update.lower_step import Lowered, alike_counters, depends_on
from ipu_dynamo.capture.update.world import Leaf, World
from ipu_dynamo.program.ir import made_names
from ipu_dynamo.program.ir.traced_update import Counter
from ipu_dynamo.program.ir.types import TensorType


@dataclass(frozen=True)
class State:
    """What an optimiser keeps, and what hangs on gradients.

    Args:
        path: of its leaf.
        key: its name, among those of its parameter, or of all that belong to none.
    """

    path: str
    key: str
    type: TensorType


@dataclass(frozen=True)
class Plan:
    """What all variants of a step have in common.

    Args:
        states: of each parameter.
        shared: states that belong to no parameter.
        counters: paths of the numbers that steps change and that hang on no gradient, and the
            counters for them.
        epochs: how many variants there are before the last one.
        hyperparameters: paths of the numbers that no step changes, only the user.
    """

    states: tuple[tuple[State, ...], ...]
    shared: tuple[State, ...]
    counters: Mapping[str, Counter]
    epochs: int
    hyperparameters: tuple[str, ...]

    @property
    def owners(self) -> dict[str, tuple[int, str]]:
        """By path of a parameter's state, the parameter and the key."""
        return {s.path: (place, s.key) for place, of in enumerate(self.states) for s in of}

    @property
    def shared_names(self) -> dict[str, str]:
        """By path of a state of no parameter, its variable."""
        return {state.path: state.key for state in self.shared}


def plan(last: Lowered, epochs: int, first: World) -> Plan:
    """What is a counter, and what a state, from the step that has all of them.

    Args:
        first: what there is before the first step.
    """
    world, inputs = last.traced.world, last.inputs
    numbers = {path for path, leaf in inputs.items() if leaf.is_number or world.is_known(leaf)}
    while True:  # what hangs on tensors is no counter, and neither is what hangs on that
        sources = {last.leaves[path] for path in inputs.keys() - numbers}
        hangs = depends_on(last.graph, {*last.parameters, *last.gradients, *sources})
        wrong = {p for p in numbers if isinstance(n := last.after.get(p), fx.Node) and hangs[n]}
        if not wrong:
            break
        numbers -= wrong
    known = {leaf.path: leaf for leaf in first.leaves}
    counters, hyperparameters = {}, []
    for path, leaf in inputs.items():
        changed = last.after.get(path) is not last.leaves[path]
        if path in numbers and (changed or leaf.parameter is not None or path not in known):
            counters[path] = _counter(leaf, world.names)
        elif path in numbers:
            hyperparameters.append(path)
    for paths in alike_counters(world):
        own = [path for path in paths if path in counters]
        if len({last.after[path] for path in own}) == 1:
            leaf = inputs[own[0]]
            shared = _counter(replace(leaf, parameter=None), world.names)
            counters |= dict.fromkeys(own, shared)
    counters = {path: _beginning(c, known.get(path)) for path, c in counters.items()}
    kept = [path for path in inputs if path not in numbers]
    states, others = _states(last, kept)
    return Plan(states, others, counters, epochs, tuple(hyperparameters))


def _states(
    last: Lowered, paths: Sequence[str]
) -> tuple[tuple[tuple[State, ...], ...], tuple[State, ...]]:
    """What each parameter has for itself, and what belongs to none."""
    world, inputs = last.traced.world, last.inputs
    free = [path for path in paths if inputs[path].parameter is None]
    owners = owners_of_states(last, free)
    own: list[list[State]] = [[] for _ in world.parameters]
    shared: list[State] = []
    for path in paths:
        leaf = inputs[path]
        owner = leaf.parameter if leaf.parameter is not None else owners.get(path)
        if owner is None or leaf.is_number:
            shared.append(State(path, _variable(leaf, world.names), _type(leaf)))
        else:
            own[owner].append(State(path, leaf.key, _type(leaf)))
    short = [
        [replace(state, key=state.key.removeprefix(f"{name}.")) for state in of]
        for name, of in zip(world.names, own, strict=True)
    ]
    if free and len({tuple(state.key for state in of) for of in short}) > 1:
        short = [[replace(s, key=f"state{i}") for i, s in enumerate(of)] for of in own]
    return tuple(map(tuple, short)), tuple(shared)


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
