"""Find which turns of a micro-batch must be done before which, from what they read and write."""

from collections.abc import Sequence

from ipu_dynamo.program import Call, Program
from ipu_dynamo.program.schedule.registers import moves_of_calls, number_slots
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import turns


def dependences(program: Program) -> tuple[tuple[int, ...], ...]:
    """For each turn the earlier ones that must be done before it.

    They made what it reads; or also read what is forgotten after it; or use a variable before it
    that the micro-batch changes. The first turn begins a micro-batch, and the last one ends it.
    """
    uses = _uses(program)
    changed = changed_slots(program)
    kept = {number_slots(program)[variable.name] for variable in program.variables}
    count = len(turns(calls_of(program)))
    needed: list[set[int]] = [{0} if index else set() for index in range(count)]
    needed[-1] = set(range(count - 1))
    for slot, users in uses.items():
        if slot in changed:
            for position, user in enumerate(users):
                needed[user].update(users[:position])
        elif slot not in kept:
            maker, last = users[0], users[-1]
            for user in users[1:]:
                needed[user].add(maker)
            needed[last].update(users[:-1])
    return tuple(tuple(sorted(before)) for before in needed)


def changes_between_calls(program: Program) -> bool:
    """Whether a micro-batch changes a variable that several of its turns use."""
    uses = _uses(program)
    return any(len(uses.get(slot, ())) > 1 for slot in changed_slots(program))


def changed_slots(program: Program) -> set[int]:
    """Slots of the variables that calls write in place."""
    slots = number_slots(program)
    written = {function.name: function.written for function in program.functions}
    return {
        slots[call.arguments[position]]
        for call in calls_of(program)
        for position in written[call.function]
    }


def calls_of(program: Program) -> Sequence[Call]:
    """The calls of a micro-batch, in order."""
    return [i for i in sections(program).loop if isinstance(i, Call)]


def _uses(program: Program) -> dict[int, list[int]]:
    """For each slot the turns that read or write it, in order; what makes a value is first."""
    slots = number_slots(program)
    loads, stores = moves_of_calls(program, slots)
    calls = calls_of(program)
    turn_of = [index for index, turn in enumerate(turns(calls)) for _ in turn]
    uses: dict[int, dict[int, None]] = {}
    for index, call in enumerate(calls):
        names = (*call.arguments, *(name for name in call.results if name))
        here = [slots[name] for name in names]
        here += [s for m in (*loads[index], *stores[index]) for s in (m.source, m.target)]
        for slot in here:
            uses.setdefault(slot, {})[turn_of[index]] = None
    return {slot: list(users) for slot, users in uses.items()}
