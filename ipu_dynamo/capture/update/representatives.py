"""Trace few parameters for many: of those for which a step does the same, one is enough.

The choice is not guessed. The step runs for all parameters on tensors without memory, and the
operators of each parameter are noted, with their numbers. Then the step runs for the chosen
parameters only. All parameters are traced if one differs from its representative in an operator or
a number. They are also traced if an operator takes tensors of several parameters, or if the step
cannot run that way.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.capture.private.operator_log import NotSeparableError, OperatorLog
from ipu_dynamo.capture.private.update_symbols import inside
from ipu_dynamo.capture.update.world import Leaf, World, world_of

_PERTURBATION = 2.0**-20  # equal numbers are moved apart by so much, to see which of them is taken


def representatives(worlds: Sequence[World]) -> tuple[int, ...]:
    """For each parameter the index of the one that is traced for it, in all `worlds`."""
    everybody = tuple(range(len(worlds[0].parameters)))
    first: dict[Any, int] = {}
    signatures = [_signatures(world) for world in worlds]
    stands = tuple(
        first.setdefault(tuple(of[place] for of in signatures), place) for place in everybody
    )
    if stands == everybody or not all(map(_is_separable, worlds)):
        return everybody
    same = all(_does_the_same(world, stands, moved) for world in worlds for moved in (False, True))
    return stands if same else everybody


def reduced(world: World, stands: Sequence[int]) -> World:
    """The world of an optimiser that has the representatives only."""
    traced = dict.fromkeys(stands)
    if len(traced) == len(world.parameters):
        return world
    small: Any = object.__new__(type(world.optimizer))
    vars(small).update(vars(world.optimizer))
    groups: list[dict[str, Any]] = []
    for group, members in zip(world.optimizer.param_groups, world.members, strict=True):
        places = [place for place, i in enumerate(members) if i in traced]
        own = {**group, "params": [world.parameters[members[place]] for place in places]}
        if "param_names" in group:
            called = world.called[sum("param_names" in before for before in groups)]
            own["param_names"] = [called[place] for place in places]
        groups.append(own)
    vars(small)["param_groups"] = groups
    kept = {id(world.parameters[i]) for i in traced}
    vars(small)["state"] = {
        key: state
        for key, state in world.optimizer.state.items()
        if not isinstance(key, Tensor) or id(key) in kept
    }
    names = {id(world.parameters[i]): world.names[i] for i in traced}
    return world_of(small, names, own_foreach=world.own_foreach)


def places(stands: Sequence[int]) -> list[int]:
    """For each parameter, the index of its representative among the representatives."""
    place = {traced: number for number, traced in enumerate(dict.fromkeys(stands))}
    return [place[traced] for traced in stands]


def _is_separable(world: World) -> bool:
    """Whether all that it keeps belongs to a parameter, but for groups' numbers."""
    return all(
        leaf.refers is None and (leaf.parameter is not None or not leaf.is_tensor)
        for leaf in world.leaves
    )


def _signatures(world: World) -> list[Any]:
    """A key for each parameter: its group, its layout, and the kinds of its states."""
    group_of = {i: number for number, members in enumerate(world.members) for i in members}
    found: list[list[Any]] = [
        [group_of[i], p.shape, p.stride(), p.dtype, p.device]
        for i, p in enumerate(world.parameters)
    ]
    for leaf in world.leaves:
        if leaf.parameter is not None:
            found[leaf.parameter].append((leaf.key, _look(world, leaf)))
    return [(*own[:5], *sorted(own[5:])) for own in found]


def _look(world: World, leaf: Leaf) -> str:
    value = leaf.value
    if not leaf.is_tensor:
        return f"{type(value).__name__} {value!r}"
    known = f" {value.item()}" if world.is_known(leaf) else ""
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}{known}"


def _does_the_same(world: World, stands: Sequence[int], moved: bool) -> bool:
    """Whether a step has the same operators for each parameter as for its representative alone."""
    try:
        every, rest = _operators(world, moved)
        alone, rest_alone = _operators(reduced(world, stands), moved)
    except Exception:  # a step that cannot run that way is traced for all
        return False
    pairs = zip(every, places(stands), strict=True)
    return rest == rest_alone and all(own == alone[place] for own, place in pairs)


def _operators(world: World, moved: bool) -> tuple[list[list[str]], list[str]]:
    """List a step's operators of each parameter, and the results that belong to no parameter."""
    own = [parameter.detach().to("meta") for parameter in world.parameters]
    gradients: list[Tensor] = [torch.empty_like(parameter) for parameter in own]
    owned = [(t, i, "weight") for i, t in enumerate(own)]
    owned += [(t, i, "gradient") for i, t in enumerate(gradients)]
    values, numbers = [], 0
    for leaf in world.leaves:
        value = leaf.value
        if leaf.is_tensor:
            assert leaf.parameter is not None
            value = value.detach()
            value = value.clone() if world.is_known(leaf) else value.to("meta")
            owned.append((value, leaf.parameter, leaf.key))
        elif leaf.parameter is None and type(value) is float and moved:
            numbers += 1
            value *= 1 + _PERTURBATION * numbers
        values.append(value)
    shadow = world.shadow(values, own, gradients)
    log = OperatorLog(owned)
    with torch.no_grad(), log, inside():
        type(world.optimizer).step(shadow)
    for parameter in own:
        parameter.requires_grad_()
    names = dict(zip(map(id, own), world.names, strict=True))
    after = world_of(shadow, names, own_foreach=world.own_foreach)
    lines = [[*log.lines[i], log.described(p)] for i, p in enumerate(own)]
    rest: list[str] = []
    for leaf in after.leaves:
        if leaf.is_tensor and log.owner(leaf.value) not in (None, leaf.parameter):
            raise NotSeparableError("a state is another parameter's")
        line = f"{leaf.key} {log.described(leaf.value)}"
        (rest if leaf.parameter is None else lines[leaf.parameter]).append(line)
    return lines, rest
