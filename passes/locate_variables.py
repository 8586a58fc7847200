"""Say which variables live in streaming memory, and write the loads and stores around their use.

Before   variables, all of them on the chip
After    those of the kinds that `Locations` sends away are off the chip; every call loads the
         weights that it reads, a step its accumulators, an update what it changes
Keeps    calls, updates, and what they name.
Source   PopTorch user guide, "poptorch.TensorLocationSettings".
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from ipu_dynamo.options import Location, Locations
from ipu_dynamo.program import Call, Instruction, Load, Store, Update, Variable


def locate_variables(
    variables: Iterable[Variable], locations: Locations, changed: frozenset[str]
) -> list[Variable]:
    """The variables, each where it lives. Those that a micro-batch changes stay on the chip."""
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
        away = location.off_chip and prod(variable.type.shape) >= location.min_elements
        located.append(replace(variable, off_chip=away))
    return located


def move_in_micro_batch(
    body: Iterable[Instruction], away: Mapping[str, Variable]
) -> list[Instruction]:
    """Load before every call the weights that it reads."""
    moved: list[Instruction] = []
    for instruction in body:
        if isinstance(instruction, Call):
            phase = None if instruction.phase is None else instruction.phase - 1
            for name in dict.fromkeys(instruction.arguments):
                if name in away and away[name].kind == "parameter":
                    moved.append(_load(away[name], instruction.ipu, phase))
        moved.append(instruction)
    return moved


def move_before_step(away: Mapping[str, Variable]) -> list[Instruction]:
    """Load the accumulators."""
    return [_load(v, v.ipu) for v in away.values() if v.kind == "accumulator"]


def move_after_step(body: Iterable[Instruction], away: Mapping[str, Variable]) -> list[Instruction]:
    """Load before every update the weights and states that it changes, and store them after it;
    store the accumulators at the end."""
    moved: list[Instruction] = []
    for instruction in body:
        if not isinstance(instruction, Update):
            moved.append(instruction)
            continue
        states = [name for _, names in instruction.states for name in names]
        used = [away[n] for n in dict.fromkeys((*instruction.parameters, *states)) if n in away]
        moved += [_load(v, instruction.ipu) for v in used]
        moved.append(instruction)
        moved += [_store(v) for v in used]
    return moved + [_store(v) for v in away.values() if v.kind == "accumulator"]


def _load(variable: Variable, ipu: int, phase: int | None = None) -> Load:
    name = variable.name
    return Load(name, name, variable.type, ipu, phase, _source(variable))


def _store(variable: Variable) -> Store:
    name = variable.name
    return Store(name, name, variable.type, variable.ipu, None, _source(variable))


def _source(variable: Variable) -> str:
    return {
        "parameter": "the weights",
        "state": "the optimizer's state",
        "accumulator": "the gradients",
    }[variable.kind]
