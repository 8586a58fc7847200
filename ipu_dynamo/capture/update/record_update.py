"""Record an optimiser's steps from its first on, until its states keep their kinds."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.capture.update.representatives import reduced, representatives
from ipu_dynamo.capture.update.trace_step import (
    HOST,
    RecordedStep,
    UntraceableUpdate,
    explained,
    trace_step,
)
from ipu_dynamo.capture.update.world import World

_EPOCHS = 3  # steps that may change the kinds of an optimiser's state


@dataclass(frozen=True)
class RecordedUpdate:
    """The steps of an optimiser, from the one that it would make now.

    Args:
        worlds: its leaves now, and after each step that changes their kinds.
        stands: for each parameter, the index of the parameter that is traced for it.
        steps: of the traced parameters. All but the last are for one step each.
    """

    worlds: tuple[World, ...]
    stands: tuple[int, ...]
    steps: tuple[RecordedStep, ...]


def record_update(world: World, number_operators: Collection[str]) -> RecordedUpdate:
    """Record the steps of an optimiser from `world` on.

    Args:
        number_operators: names of the operators whose number may change from step to step.

    Raises:
        UntraceableUpdate: with the line of the optimiser.
    """
    worlds = [world]
    while True:
        following = after_step(worlds[-1])
        if following.tree == worlds[-1].tree:
            break
        worlds.append(following)
        if len(worlds) > _EPOCHS + 1:
            raise UntraceableUpdate(
                f"the optimizer keeps other things after each of {_EPOCHS} steps", hint=HOST
            )
    return _recorded(worlds, number_operators)


def record_step(world: World, number_operators: Collection[str]) -> RecordedUpdate:
    """Record one step of an optimiser whose states keep their kinds; see `record_update`."""
    return _recorded([world], number_operators)


def _recorded(worlds: Sequence[World], number_operators: Collection[str]) -> RecordedUpdate:
    stands = representatives(worlds)
    steps = tuple(trace_step(reduced(world, stands), number_operators) for world in worlds)
    return RecordedUpdate(tuple(worlds), stands, steps)


def after_step(world: World) -> World:
    """Make a step on copies, with gradients of zero, and return the leaves after it. Only kinds,
    shapes and counters mean anything."""
    own = [parameter.detach().clone() for parameter in world.parameters]
    values = [_copied(leaf.value, own, leaf.refers) for leaf in world.leaves]
    shadow = world.shadow(values, own, [torch.zeros_like(p) for p in own])
    if {id(p) for group in shadow.param_groups for p in group["params"]} != {*map(id, own)}:
        kind = type(world.optimizer)
        raise UntraceableUpdate(
            f"{kind.__module__}.{kind.__qualname__} has the groups of another optimizer",
            hint=f"pass the optimizer that it wraps, or: {HOST}",
        )
    devices = sorted({p.device.index or 0 for p in own if p.device.type == "cuda"})
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            type(world.optimizer).step(shadow)
        except Exception as error:
            raise explained(error, world) from error
    return world.of_changed(shadow, own)


def _copied(value: Any, parameters: list[Tensor], refers: int | None) -> Any:
    if refers is not None:
        return parameters[refers]
    return value.detach().clone() if isinstance(value, Tensor) else value
