"""Describe what this computer does for a program: the program, and what decides how it runs."""

from dataclasses import dataclass, field

from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.ir.program import Program


@dataclass(frozen=True, slots=True)
class HostProgram:
    """A program, and what runs in its place.

    Args:
        program: what every IPU does, the same on every machine.
        inlined: the same in the form in which this computer runs it: functions write variables,
            and may have operators that are faster here.
        plan: how it runs, once it is bound to tensors and an engine.
    """

    program: Program
    inlined: Program
    plan: HostPlan | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return str(self.inlined if self.plan is None else self.plan)
