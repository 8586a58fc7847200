"""Cut the body of a program at its loops, and read how often each part runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ipu_dynamo.program.ir.instructions import Instruction, Plain, Repeat

if TYPE_CHECKING:
    from ipu_dynamo.program.ir.program import Program


@dataclass(frozen=True, slots=True)
class Sections:
    """The instructions before, in, and after the micro-batches of a step.

    Args:
        steps: how often all of it runs in a call: the device iterations of a training program.
        micro_batches: how often `loop` runs in a step, on each replica.
    """

    before: tuple[Plain, ...]
    loop: tuple[Plain, ...]
    after: tuple[Plain, ...]
    steps: int
    micro_batches: int

    @property
    def all(self) -> tuple[Plain, ...]:
        return (*self.before, *self.loop, *self.after)


def sections(program: "Program") -> Sections:
    """Cut a program's body, of a shape that `verify` accepts.

    Raises:
        ValueError: it has another shape.
    """
    match program.body:
        case (Repeat(over="device_iteration", count=steps, body=body),):
            pass
        case body:
            steps = 1
    loops = [instruction for instruction in body if isinstance(instruction, Repeat)]
    if [loop.over for loop in loops] != ["micro_batch"]:
        raise ValueError(f"a step has one loop over micro-batches, not {len(loops)} loops")
    (loop,) = loops
    position = body.index(loop)
    before, inside, after = map(_plain, (body[:position], loop.body, body[position + 1 :]))
    return Sections(before, inside, after, steps, loop.count)


def with_sections(
    program: "Program",
    *,
    before: Sequence[Plain] | None = None,
    loop: Sequence[Plain] | None = None,
    after: Sequence[Plain] | None = None,
) -> "Program":
    """A program in which other instructions stand before, in or after its micro-batches."""
    cut = sections(program)
    outer = program.body[0] if program.kind == "training" else None
    body = outer.body if isinstance(outer, Repeat) else program.body
    (micro_batches,) = (i for i in body if isinstance(i, Repeat))
    inside = cut.loop if loop is None else tuple(loop)
    step: tuple[Instruction, ...] = (
        *(cut.before if before is None else before),
        replace(micro_batches, body=inside),
        *(cut.after if after is None else after),
    )
    if isinstance(outer, Repeat):
        step = (replace(outer, body=step),)
    return replace(program, body=step)


def _plain(body: tuple[Instruction, ...]) -> tuple[Plain, ...]:
    plain = tuple(i for i in body if not isinstance(i, Repeat))
    if len(plain) != len(body):
        raise ValueError("a loop over micro-batches has another loop in it")
    return plain
