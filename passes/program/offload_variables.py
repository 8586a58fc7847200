"""Say which variables live in streaming memory or in shards, and write the moves around their use.

Before   variables, all of them on the chip and whole on every replica
After    variables of the kinds that `Locations` moves are off the chip. Every call loads the
         weights that it reads, a step its accumulators, an update the variables that it changes.
         Sharded weights are gathered for every call that reads them. If an update is sharded, its
         gradients are summed in shards. If its parameter is whole on every replica, the parameter
         is gathered after the update
Keeps    calls, updates, and what they name.
Source   PopTorch user guide, "poptorch.TensorLocationSettings".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from math import prod

from ipu_dynamo.options import Location, Options
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.program.emit_traced import check_shards
from ipu_dynamo.passes.program.emit_update import UpdateGroup
from ipu_dynamo.program import (
    AllGather,
    AllReduce,
    Call,
    Copy,
    Load,
    Program,
    ReduceScatter,
    Store,
    Update,
    UpdatePart,
    Variable,
    WriteBuffer,
)
from ipu_dynamo.program.ir.instructions import Plain
from ipu_dynamo.program.ir.made_names import accumulator
from ipu_dynamo.program.schedule.sections import sections, with_sections

Located = Mapping[str, Variable]


class OffloadVariables(Pass):
    """The pass. `groups` are the optimiser's; a trace restricts updates in shards."""

    level = "program"
    needed = "the options say where variables live"

    options: Options
    groups: Sequence[UpdateGroup] = ()

    def __call__(self, program: Program) -> Program:
        return through_io_tiles(self._offloaded(program), self.options)

    def _offloaded(self, program: Program) -> Program:
        variables = plan(program, self.options)
        if variables == program.variables:
            return program
        located = {variable.name: variable for variable in variables}
        cut = sections(program)
        trace = next((group.trace for group in self.groups), None)
        after = list(_in_shards(cut.after, located, program.replicas))
        if trace is not None:
            check_shards(after, trace)
        copies = [step for step in cut.before if isinstance(step, Copy)]
        direct = {(c.result, c.dst): c.value for c in copies if located[c.value].off_chip}
        loop = [_read_directly(step, direct) for step in cut.loop]
        return with_sections(
            replace(program, variables=variables),
            before=_move_before_step(cut.before, located),
            loop=_move_in_micro_batch(loop, located),
            after=_move_after_step(after, located),
        )


def through_io_tiles(program: Program, options: Options) -> Program:
    """Mark the loads and stores that go through IO tiles, if there are such tiles."""
    if not program.io_tiles:
        return program
    locations = options.locations
    by_kind = {
        "parameter": locations.weights,
        "state": locations.optimizer_state,
        "accumulator": locations.accumulators,
    }
    of = {variable.name: by_kind.get(variable.kind) for variable in program.variables}

    def goes(move: Load | Store) -> bool:
        location = of.get(move.value, locations.activations)
        if location is None:
            return False
        return location.io_tiles_to_load if isinstance(move, Load) else location.io_tiles_to_store

    moves = {
        number: (replace(step, io_tiles=True),)
        for number, step in enumerate(program.walk())
        if isinstance(step, Load | Store) and goes(step)
    }
    return program.with_instructions(moves) if moves else program


def plan(program: Program, options: Options) -> tuple[Variable, ...]:
    """The variables, each where it lives. Those that a micro-batch changes stay on the chip, and
    are whole on every replica, as are numbers without a dimension, and states of no parameter."""
    cut, locations = sections(program), options.locations
    changed = {
        name for step in cut.loop if isinstance(step, WriteBuffer) for name in step.variables
    }
    states = {
        name
        for step in cut.after
        if isinstance(step, Update)
        for _, names in step.states
        for name in names
    }
    stay = Location()
    located = []
    for variable in program.variables:
        location = stay
        if variable.kind == "accumulator":
            location = locations.accumulators
        elif variable.kind == "parameter" and variable.name not in changed:
            location = locations.weights
        elif variable.kind == "state" and variable.name in states:
            location = locations.optimizer_state
        size = prod(variable.type.shape)
        away = location.off_chip and size >= location.min_elements
        divided = location.sharded and variable.type.shape and size >= location.min_sharded
        shards = sharing(variable, options.replicas) if divided else 1
        located.append(replace(variable, off_chip=away, shards=shards))
    return tuple(located)


def _in_shards(after: Sequence[Plain], located: Located, replicas: int) -> Iterator[Plain]:
    """Rewrite the end of a step to update parameters in shards, and to sum their gradients so."""
    updates = [in_shards(step, located) for step in after if isinstance(step, Update)]
    gradients = {
        gradient: parameter
        for update in updates
        for parameter, gradient in zip(update.parameters, update.gradients, strict=True)
        if parameter in update.sharded
    }
    following = iter(updates)
    for step in after:
        if isinstance(step, Update):
            yield next(following)
        elif isinstance(step, AllReduce) and not gradients.keys().isdisjoint(step.values):
            yield from _scattered(step, gradients, located, replicas)
        else:
            yield step


def _scattered(
    total: AllReduce, of: Mapping[str, str], located: Located, replicas: int
) -> Iterator[ReduceScatter | AllReduce]:
    """Cut a sum over replicas into a sum in shards and a sum of whole gradients.

    Args:
        of: the parameters of gradients that are summed in shards.
    """
    in_order = dict.fromkeys(name in of for name in total.values)
    for sharded in in_order:
        values = tuple(name for name in total.values if (name in of) == sharded)
        if not sharded:
            yield replace(total, values=values)
            continue
        types = tuple(located[accumulator(of[name])].type for name in values)
        shards = sharing(located[of[values[0]]], replicas)
        yield ReduceScatter(values, types, shards, total.ipu, total.groups)


def sharing(variable: Variable, replicas: int) -> int:
    """How many replicas have the same values of a variable: all, or those of a group."""
    return replicas if variable.groups is None else variable.groups.size


def _read_directly(call: Plain, direct: Mapping[tuple[str, int], str]) -> Plain:
    """An instruction that reads variables in streaming memory, and no copies of these.

    Args:
        direct: the variable of each copy, by its name and IPU.
    """
    if not isinstance(call, Call):
        return call
    arguments = tuple(direct.get((name, call.ipu), name) for name in call.arguments)
    return replace(call, arguments=arguments)


def _move_before_step(before: Iterable[Plain], located: Located) -> list[Plain]:
    """Load the accumulators; gather a weight in shards at its home before it is copied from there;
    copy no weight that each IPU loads itself."""
    numbers: list[Plain] = []
    copies: list[Plain] = []
    gathered: set[str] = set()
    for step in before:
        if not isinstance(step, Copy):
            numbers.append(step)
            continue
        variable = located[step.value]
        if variable.off_chip:
            continue
        if step.value not in gathered:
            copies += _whole(variable, variable.ipu)
            gathered.add(step.value)
        copies.append(step)
    sums = [v for v in located.values() if v.kind == "accumulator"]
    return [*numbers, *(load for v in sums for load in _load(v, v.ipu)), *copies]


def _move_in_micro_batch(loop: Iterable[Plain], located: Located) -> list[Plain]:
    """Load and gather before every call the weights that it reads."""
    moved: list[Plain] = []
    for step in loop:
        if isinstance(step, Call):
            phase = None if step.phase is None else step.phase - 1
            for name in dict.fromkeys(step.arguments):
                variable = located.get(name)
                if variable is not None and variable.kind == "parameter":
                    moved += _load(variable, step.ipu, phase)
                    moved += _whole(variable, step.ipu, phase)
        moved.append(step)
    return moved


def _move_after_step(after: Iterable[Plain], located: Located) -> list[Plain]:
    """Move variables around every update.

    Before it load the weights and states that it changes. After it gather variables that it changed
    in shards if every replica holds them whole, and store the loaded ones. Store accumulators at
    the end.
    """
    moved = [step for instruction in after for step in move_around(instruction, located)]
    return moved + [s for v in located.values() if v.kind == "accumulator" for s in _store(v)]


def move_around(instruction: Plain, located: Located) -> list[Plain]:
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


def _gather_updated(update: Update, located: Located) -> list[Plain]:
    """Gather variables that are updated in shards and held whole, but scalar states."""
    gathers: list[Plain] = []
    for own in _changed_by(update, located):
        shards = max(variable.shards for variable in own)
        whole = [v for v in own if v.shards == 1 and v.type.shape]
        gathers += [_gather(v, shards, update.ipu) for v in whole if shards > 1]
    return gathers


def _whole(variable: Variable, ipu: int, phase: int | None = None) -> list[Plain]:
    return [_gather(variable, variable.shards, ipu, phase)] if variable.shards > 1 else []


def _gather(variable: Variable, shards: int, ipu: int, phase: int | None = None) -> AllGather:
    source = _source(variable)
    return AllGather(variable.name, variable.type, shards, ipu, variable.groups, phase, source)


def _load(variable: Variable, ipu: int, phase: int | None = None) -> list[Plain]:
    return [_move(Load, variable, ipu, phase)] if variable.off_chip else []


def _store(variable: Variable) -> list[Plain]:
    return [_move(Store, variable, variable.ipu, None)] if variable.off_chip else []


def _move(kind: type[Load] | type[Store], variable: Variable, ipu: int, phase: int | None) -> Plain:
    name, held, source = variable.name, variable.held, _source(variable)
    return kind(name, name, held, ipu, phase, source, shard=variable.shards > 1)


def _source(variable: Variable) -> str:
    return {
        "parameter": "the weights",
        "state": "the optimizer's state",
        "accumulator": "the gradients",
    }[variable.kind]
