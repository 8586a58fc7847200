"""Find the order that passes of a micro-batch need, from the values that they read and write."""

from collections.abc import Mapping, Sequence

from ipu_dynamo.program import Call, Plain, Program
from ipu_dynamo.program.schedule.registers import number_registers
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import (
    instructions_of_passes,
    reads_and_makes,
    stage_passes,
)


def dependencies(program: Program) -> tuple[tuple[int, ...], ...]:
    """For each pass the earlier ones that must be done before it.

    An earlier pass made a value that it reads. Or it reads a value that this pass is the last to
    read, so that the value is dropped after it. Or both use a variable that the micro-batch
    changes. The first pass begins a micro-batch.
    """
    registers = number_registers(program)
    uses = _uses(program, registers)
    changed = {registers[name] for name in changed_variables(program)}
    kept = {registers[variable.name] for variable in program.variables}
    count = len(stage_passes(calls_of(program)))
    needed: list[set[int]] = [{0} if index else set() for index in range(count)]
    for register, users in uses.items():
        if register in changed:
            for position, user in enumerate(users):
                needed[user].update(users[:position])
        elif register not in kept:
            maker, last = users[0], users[-1]
            for user in users[1:]:
                needed[user].add(maker)
            needed[last].update(users[:-1])
    return tuple(tuple(sorted(before)) for before in needed)


def changes_between_calls(program: Program) -> bool:
    """Whether a micro-batch changes a variable that several of its passes use."""
    registers = number_registers(program)
    uses = _uses(program, registers)
    return any(len(uses.get(registers[name], ())) > 1 for name in changed_variables(program))


def changed_variables(program: Program) -> frozenset[str]:
    """The variables that micro-batches write: by instructions, or where these have become a part
    of functions, by calls."""
    written = _written(program)
    return frozenset(name for i in sections(program).loop for name in _changed(i, written))


def changed_by_replicas(program: Program) -> tuple[str, ...]:
    """The variables that micro-batches write, and of which each replica has its own value."""
    changed = changed_variables(program)
    own = (v for v in program.variables if not v.replicated and v.kind != "accumulator")
    return tuple(variable.name for variable in own if variable.name in changed)


def changing_passes(program: Program) -> frozenset[int]:
    """The passes that write variables."""
    passes = instructions_of_passes(sections(program).loop)
    written = _written(program)
    return frozenset(
        number
        for number, instructions in enumerate(passes)
        if any(_changed(instruction, written) for instruction in instructions)
    )


def _written(program: Program) -> dict[str, tuple[int, ...]]:
    """The arguments that each function writes."""
    return {function.name: function.written for function in program.functions}


def _changed(instruction: Plain, written: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The variables that an instruction writes."""
    if isinstance(instruction, Call):
        return tuple(instruction.arguments[position] for position in written[instruction.function])
    return instruction.written_names


def calls_of(program: Program) -> Sequence[Call]:
    """The calls of a micro-batch, in order."""
    return [i for i in sections(program).loop if isinstance(i, Call)]


def _uses(program: Program, registers: Mapping[str, int]) -> dict[int, list[int]]:
    """For each register the passes that read or write it, in order; the maker is first."""
    uses: dict[int, dict[int, None]] = {}
    for number, instructions in enumerate(instructions_of_passes(sections(program).loop)):
        for instruction in instructions:
            reads, makes = reads_and_makes(instruction)
            for name in (*reads, *makes):
                uses.setdefault(registers[name], {})[number] = None
    return {register: list(users) for register, users in uses.items()}
