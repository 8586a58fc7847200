"""Say which variables live in streaming memory or in shards, and write the moves around their use.

Before   variables, all of them on the chip and whole on every replica
After    those of the kinds that `Locations` sends away are off the chip; every call loads the
         weights that it reads, a step its accumulators, an update what it changes. Those in shards
         are gathered for every call that reads them; what is updated in shards and whole on every
         replica is gathered after the update
Keeps    calls, updates, and what they name.
Source   PopTorch user guide, "poptorch.TensorLocationSettings".
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import compress
from math import prod

from ipu_dynamo.options import Location, Locations
from ipu_dynamo.program import (
    AllGather,
    Call,
    Instruction,
    Load,
    Store,
    Update,
    UpdatePart,
    Variable,
)

Located = Mapping[str, Variable]


def locate_variables(
    variables: Iterable[Variable], locations: Locations, changed: frozenset[str], replicas: int
) -> list[Variable]:
    """The variables, each where it lives. Those that a micro-batch changes stay on the chip, and
    are whole on every replica, as are numbers without a dimension."""
    of_kind = {
        "parameter": locations.weights,
        "state": locations.optimizer_state,
        "accumulator": locations.accumulators,
    }
    stay = Location()
    located = []
    for variable in variables:
        location = of_kind.get(variable.kind, stay)
        if variable.kind != "accumulator" and variable.name in changed:
            location = stay
        size = prod(variable.type.shape)
        away = location.off_chip and size >= location.min_elements
        divided = location.sharded and variable.type.shape and size >= location.min_sharded
        shards = sharing(variable, replicas) if divided else 1
        located.append(replace(variable, off_chip=away, shards=shards))
    return located


def sharing(variable: Variable, replicas: int) -> int:
    """How many replicas have the same values of a variable: all, or those of a group."""
    return replicas if variable.groups is None else variable.groups.size


def move_in_micro_batch(body: Iterable[Instruction], located: Located) -> list[Instruction]:
    """Load and gather before every call the weights that it reads."""
    moved: list[Instruction] = []
    for instruction in body:
        if isinstance(instruction, Call):
            phase = None if instruction.phase is None else instruction.phase - 1
            for name in dict.fromkeys(instruction.arguments):
                variable = located.get(name)
                if variable is not None and variable.kind == "parameter":
                    moved += _load(variable, instruction.ipu, phase)
                    moved += _whole(variable, instruction.ipu, phase)
        moved.append(instruction)
    return moved


def gather_for_copies(variable: Variable) -> list[Instruction]:
    """Gather a weight at its home, which copies it to other IPUs then."""
    return _whole(variable, variable.ipu)


def move_before_step(located: Located) -> list[Instruction]:
    """Load the accumulators."""
    return [load for v in located.values() if v.kind == "accumulator" for load in _load(v, v.ipu)]


def move_after_step(body: Iterable[Instruction], located: Located) -> list[Instruction]:
    """Load before every update the weights and states that it changes; after it gather what it
    changed in shards and every replica holds whole, and store what was loaded; store the
    accumulators at the end."""
    moved = [step for instruction in body for step in move_around(instruction, located)]
    return moved + [s for v in located.values() if v.kind == "accumulator" for s in _store(v)]


def move_around(instruction: Instruction, located: Located) -> list[Instruction]:
    """An instruction of a step's end with the moves of the weights and states that it uses."""
    if isinstance(instruction, Update):
        states = [name for _, names in instruction.states for name in names]
        used = [located[name] for name in dict.fromkeys((*instruction.parameters, *states))]
        gathers = _gather_updated(instruction, located)
    elif isinstance(instruction, UpdatePart):
        names = dict.fromkeys((instruction.parameter, *instruction.states))
        used, gathers = [located[name] for name in names], []
    else:
        return [instruction]
    loads = [load for v in used for load in _load(v, instruction.ipu)]
    return [*loads, instruction, *gathers, *(store for v in used for store in _store(v))]


def in_shards(update: Update, located: Located) -> Update:
    """The update, which knows its parameters that replicas update in shards: they or a state of
    theirs are in shards."""
    divided = [max(v.shards for v in own) > 1 for own in _changed_by(update, located)]
    return replace(update, sharded=tuple(compress(update.parameters, divided)))


def _changed_by(update: Update, located: Located) -> list[list[Variable]]:
    """For every parameter of an update, it and its states."""
    names = zip(update.parameters, *(states for _, states in update.states), strict=True)
    return [[located[name] for name in own] for own in names]


def _gather_updated(update: Update, located: Located) -> list[Instruction]:
    """Gather what is updated in shards and held whole; scalar states count alike everywhere."""
    gathers: list[Instruction] = []
    for own in _changed_by(update, located):
        shards = max(variable.shards for variable in own)
        whole = [v for v in own if v.shards == 1 and v.type.shape]
        gathers += [_gather(v, shards, update.ipu) for v in whole if shards > 1]
    return gathers


def _whole(variable: Variable, ipu: int, phase: int | None = None) -> list[Instruction]:
    return [_gather(variable, variable.shards, ipu, phase)] if variable.shards > 1 else []


def _gather(variable: Variable, shards: int, ipu: int, phase: int | None = None) -> AllGather:
    source = _source(variable)
    return AllGather(variable.name, variable.type, shards, ipu, variable.groups, phase, source)


def _load(variable: Variable, ipu: int, phase: int | None = None) -> list[Instruction]:
    return [_move(Load, variable, ipu, phase)] if variable.off_chip else []


def _store(variable: Variable) -> list[Instruction]:
    return [_move(Store, variable, variable.ipu, None)] if variable.off_chip else []


def _move(
    kind: type[Load] | type[Store], variable: Variable, ipu: int, phase: int | None
) -> Instruction:
    name, held, source = variable.name, variable.held, _source(variable)
    return kind(name, name, held, ipu, phase, source, shard=variable.shards > 1)


def _source(variable: Variable) -> str:
    return {
        "parameter": "the weights",
        "state": "the optimizer's state",
        "accumulator": "the gradients",
    }[variable.kind]
