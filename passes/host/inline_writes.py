"""Join functions with the writes of variables that follow their calls, which then write in place.

Before   a program whose instructions say what is written
After    a HostProgram, whose functions write
Keeps    what every variable holds after each stage pass of a micro-batch.
Source   design of this project: graphs that are compiled are better with their writes in them.
"""

from dataclasses import dataclass
from typing import ClassVar

from ipu_dynamo.passes.levels import Level
from ipu_dynamo.program import HostProgram, Program


@dataclass(frozen=True)
class InlineWrites:
    """The pass."""

    name: ClassVar[str] = "InlineWrites"
    level: ClassVar[Level] = "program"
    needed: ClassVar[str] = "only functions that write are run"

    def __call__(self, program: Program) -> HostProgram:
        return HostProgram(program, program)
