"""Trace an optimiser's step from its first on, until what it keeps stays the same."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipu_dynamo.capture.update.cut_step import cut
from ipu_dynamo.capture.update.lower_step import lower
from ipu_dynamo.capture.update.plan_step import Plan, plan
from ipu_dynamo.capture.update.representatives import (
    places,
    plan_of,
    reduced,
    representatives,
    step_for_all,
)
from ipu_dynamo.capture.update.trace_step import (
    HOST,
    UntraceableUpdate,
    explained,
    trace_step,
)
from ipu_dynamo.capture.update.world import World, world_of
from ipu_dynamo.program.ir.traced_update import TracedStep

_EPOCHS = 3  # steps that may change what an optimiser keeps


@dataclass(frozen=True)
class Variants:
    """The steps of an optimiser, from the one that it would make now.

    Args:
        worlds: what it has now, and after each step that changes the kind of that.
        plan: what all have in common.
        steps: traced; all but the last are for one step each.
    """

    worlds: tuple[World, ...]
    plan: Plan
    steps: tuple[TracedStep, ...]

    @property
    def first(self) -> World:
        """What it has now."""
        return self.worlds[0]


def trace_variants(
    optimizer: Optimizer, names: Mapping[int, str], without: Collection[str] = ()
) -> Variants:
    """Trace the steps of an optimiser.

    Args:
        names: of the model's parameters, by identity.
        without: parameters that have no gradient.

    Torch steps alike tensor by tensor and with lists of tensors (`foreach`), and the first is what
    many parameters are traced by few of. Where that does not trace, what the groups say of
    `foreach` counts: the two are different code, of other people.

    Raises:
        UntraceableUpdate: with the line of the optimiser.
    """
    try:
        return _traced(world_of(optimizer, names, without))
    except UntraceableUpdate:
        if all(group.get("foreach", False) is False for group in optimizer.param_groups):
            raise
        with suppress(UntraceableUpdate):
            return _traced(world_of(optimizer, names, without, own_foreach=True))
        raise


def _traced(world: World) -> Variants:
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
    stands = representatives(worlds)
    traced = [reduced(world, stands) for world in worlds]
    lowered = [lower(trace_step(world)) for world in traced]
    common = plan(lowered[-1], len(worlds) - 1, traced[0])
    steps = [cut(step, common, epoch) for epoch, step in enumerate(lowered)]
    return Variants(
        tuple(worlds),
        plan_of(common, traced[-1], worlds[-1], places(stands)),
        tuple(step_for_all(step, worlds[0], stands) for step in steps),
    )


def trace_variant(world: World, common: Plan) -> tuple[TracedStep, list[str]]:
    """Trace the step of another variant; the lines by whose conditions it holds, too."""
    stands = representatives([world])
    traced = reduced(world, stands)
    lowered = lower(trace_step(traced))
    small = plan_of(common, world, traced, list(dict.fromkeys(stands)))
    step = step_for_all(cut(lowered, small, common.epochs), world, stands)
    return step, [line for _, line in lowered.conditions]


def after_step(world: World) -> World:
    """What an optimiser has after a step, made on copies with gradients of zero: only kinds, shapes
    and counters mean anything."""
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
    for group, original in zip(shadow.param_groups, world.optimizer.param_groups, strict=True):
        group |= {key: original[key] for key in world.overridden(original)}
    for parameter in own:
        parameter.requires_grad_()
    names = dict(zip(map(id, own), world.names, strict=True))
    return world_of(shadow, names, own_foreach=world.own_foreach)


def _copied(value: Any, parameters: list[Tensor], refers: int | None) -> Any:
    if refers is not None:
        return parameters[refers]
    return value.detach().clone() if isinstance(value, Tensor) else value
