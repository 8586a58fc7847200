"""Give a program the updates that were traced for other numbers.

Before   updates by functions of one trace
After    updates by those of another one: the same parameters, states and counters
Keeps    the loop over micro-batches, variables, and where updates stand.
"""

from collections.abc import Sequence
from dataclasses import replace

from ipu_dynamo.options import Options
from ipu_dynamo.passes.program.emit_traced import TracedEnd
from ipu_dynamo.program import Copy, Instruction, Program, Repeat, TracedStep, Update, UpdateFactors
from ipu_dynamo.program.ir.verify.program import verify


def with_trace(
    program: Program, trace: TracedStep, groups: Sequence[object], options: Options
) -> Program:
    """`program` with the updates of `trace`.

    Args:
        groups: of the optimiser, as in the program.
    """
    (loop,) = program.body
    assert isinstance(loop, Repeat)
    updates = [i for i in loop.body if isinstance(i, Update)]
    old = {name for i in loop.body if isinstance(i, UpdateFactors) for name in i.results}
    owners = {name: update.ipu for update in updates for name in update.parameters}
    end = TracedEnd(trace, groups, owners, options)  # type: ignore[arg-type]
    located = {variable.name: variable for variable in program.variables}
    body: list[Instruction] = []
    copied = False
    for instruction in loop.body:
        match instruction:
            case UpdateFactors():
                body.append(end.factors())
            case Copy(value=name) if name in old:
                continue
            case Update():
                split = end.split(instruction, located)
                if not copied:
                    body += end.copies(updates)
                    copied = True
                body += split
            case _:
                body.append(instruction)
    made = replace(
        program,
        body=(replace(loop, body=tuple(body)),),
        update_functions=(trace.factors, *trace.pieces.values()),
    )
    verify(made)
    return made
