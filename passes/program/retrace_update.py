"""Give a program the updates that were traced for other numbers.

Before   updates by functions of one trace
After    updates by those of another one: the same parameters, states and counters
Keeps    the loop over micro-batches, variables, and where updates stand.
Source   optimisers that decide by their numbers in Python, as RAdam does after five steps.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ipu_dynamo.options import Options
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.program.emit_traced import TracedForm, check_shards
from ipu_dynamo.passes.program.emit_update import UpdateGroup
from ipu_dynamo.passes.program.offload_variables import in_shards, move_around, through_io_tiles
from ipu_dynamo.program import (
    Instruction,
    JointUpdate,
    Load,
    Program,
    Repeat,
    TracedStep,
    Update,
    UpdateFactors,
    UpdatePart,
)
from ipu_dynamo.program.ir.base_instruction import How


def _without_rounds(body: Iterable[Instruction]) -> list[Instruction]:
    """Leave out the rounds before the updates, their moves, and all copies of their results."""
    kept: list[Instruction] = []
    made: set[str] = set()
    moved_for: Collection[str] = ()  # the variables that were loaded for the last part
    for instruction in body:
        if isinstance(instruction, UpdateFactors | UpdatePart | JointUpdate):
            made.update(instruction.made_names)
        if isinstance(instruction, UpdatePart):
            moved_for = {instruction.parameter, *instruction.states}
            while kept and _moves(kept[-1], "loaded", moved_for):
                kept.pop()
        elif not (
            isinstance(instruction, JointUpdate)
            or _moves(instruction, "copied", made)
            or _moves(instruction, "stored", moved_for)
        ):
            moved_for = ()
            kept.append(instruction)
    return kept


def _moves(instruction: Instruction, how: How, names: Collection[str]) -> bool:
    return any(move.how == how and move.value in names for move in instruction.moves)


def _begins_updates(rest: Sequence[Instruction]) -> bool:
    """Whether the updates of a step begin with `rest`, or the loads for the first update."""
    following = next((i for i in rest if not isinstance(i, Load)), None)
    return isinstance(following, Update)


def _with_trace(
    program: Program, trace: TracedStep, groups: Sequence[UpdateGroup], options: Options
) -> Program:
    (loop,) = program.body
    assert isinstance(loop, Repeat)
    updates = [i for i in loop.body if isinstance(i, Update)]
    owners = {name: update.ipu for update in updates for name in update.parameters}
    form = TracedForm(trace, groups, owners, options)
    located = {variable.name: variable for variable in program.variables}
    split = [[in_shards(part, located) for part in form.split(update)] for update in updates]
    parts = [part for of in split for part in of]
    rounds = form.rounds(parts)
    check_shards([*rounds, *parts], trace)
    added: list[Instruction] = [*form.copies(updates)]
    added += [step for i in rounds for step in move_around(i, located)]
    body: list[Instruction] = []
    following = iter(split)
    loop_body = _without_rounds(loop.body)
    first = next(i for i in range(len(loop_body)) if _begins_updates(loop_body[i:]))
    for number, instruction in enumerate(loop_body):
        if number == first:
            body += added
        match instruction:
            case UpdateFactors():
                body.append(form.factors())
            case Update():
                body += next(following)
            case _:
                body.append(instruction)
    program = replace(
        program,
        body=(replace(loop, body=tuple(body)),),
        update_functions=(trace.factors, *trace.pieces.values()),
    )
    return through_io_tiles(program, options)


class RetraceUpdate(Pass):
    """The pass.

    Args:
        trace: the step to update by; None: updates stay as they are.
        groups: of the optimiser, as in the program.
    """

    level = "program"
    needed = "the program's updates hold for other numbers"

    options: Options
    trace: TracedStep | None = None
    groups: Sequence[UpdateGroup] = ()

    def __call__(self, program: Program) -> Program:
        if self.trace is None:
            return program
        return _with_trace(program, self.trace, self.groups, self.options)
