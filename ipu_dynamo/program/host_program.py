"""Describe what this computer does for a program: the program, and what decides how it runs."""

from dataclasses import dataclass

from ipu_dynamo.program.ir.program import Program


@dataclass(frozen=True, slots=True)
class HostProgram:
    """A program, and what runs in its place.

    Args:
        program: what every IPU does, the same on every machine.
        inlined: the same in the form in which this computer runs it: functions write variables,
            and may have operators that are faster here.
    """

    program: Program
    inlined: Program
