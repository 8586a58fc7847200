"""Cut the body of a program at its loop over micro-batches."""

from dataclasses import dataclass

from ipu_dynamo.program.ir.instructions import Instruction, Repeat
from ipu_dynamo.program.ir.program import Program


@dataclass(frozen=True, slots=True)
class Sections:
    """What is done before, in, and after the micro-batches of a step."""

    before: tuple[Instruction, ...]
    loop: tuple[Instruction, ...]
    after: tuple[Instruction, ...]

    @property
    def all(self) -> tuple[Instruction, ...]:
        return (*self.before, *self.loop, *self.after)


def sections(program: Program) -> Sections:
    """Cut a program's body at the loop over micro-batches."""
    body = program.body
    if len(body) == 1 and isinstance(body[0], Repeat) and body[0].over == "device_iteration":
        body = body[0].body
    (position,) = (i for i, instruction in enumerate(body) if isinstance(instruction, Repeat))
    loop = body[position]
    assert isinstance(loop, Repeat)
    return Sections(body[:position], loop.body, body[position + 1 :])
