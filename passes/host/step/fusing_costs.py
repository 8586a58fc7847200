"""Estimate what a step and its update as one function gain, and what they cost."""

from dataclasses import dataclass

from ipu_dynamo.passes.host.step.fuse_updates import calls_of
from ipu_dynamo.program import Program, Update, Variable
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.tune.costs import (
    CALLING_A_PARAMETER,
    CALLING_A_TRACED_FUNCTION,
    CALLING_AN_UPDATE,
    COMPILING_AN_UPDATE,
    COPIES_HOME,
    MOST_COPIES,
    NEW_STATES_BYTES_PER_SECOND,
    STEPS_OF_A_TRAINING,
    STORES_OF_A_GRADIENT,
    UPDATE_BYTES_PER_SECOND,
)


@dataclass(frozen=True, slots=True)
class FusingCosts:
    """What fusing changes.

    Args:
        gained: seconds of each step.
        compiling: seconds, once.
        nbytes: what is held twice.
    """

    gained: float
    compiling: float
    nbytes: int

    @property
    def worth(self) -> bool:
        """Whether it gains more than it costs."""
        return self.nbytes <= MOST_COPIES and self.gained * STEPS_OF_A_TRAINING > self.compiling

    def __str__(self) -> str:
        gained = f"{abs(self.gained) * 1e6:.0f} us a step {'less' if self.gained >= 0 else 'more'}"
        return f"{gained}, {self.compiling:.1f} s to compile, {self.nbytes / 2**20:.1f} MiB twice"


def fusing_costs(program: Program) -> FusingCosts:
    """The estimate for a program that could be fused."""
    after = sections(program).after
    updates = [i for i in after if isinstance(i, Update)]
    variables = {variable.name: variable for variable in program.variables}
    weights = [name for update in updates for name in update.parameters]
    states = [name for update in updates for _, names in update.states for name in names]
    gradients = _nbytes(variables, [name for update in updates for name in update.gradients])
    new = _nbytes(variables, states)
    held = new + _nbytes(variables, weights)
    called = CALLING_AN_UPDATE * len(updates) + CALLING_A_PARAMETER * len(weights)
    called += CALLING_A_TRACED_FUNCTION * calls_of(after)
    stored = STORES_OF_A_GRADIENT * gradients / UPDATE_BYTES_PER_SECOND
    home = COPIES_HOME * held / UPDATE_BYTES_PER_SECOND / sections(program).steps
    gained = called + stored - home - new / NEW_STATES_BYTES_PER_SECOND
    return FusingCosts(gained, COMPILING_AN_UPDATE * len(weights), held)


def _nbytes(variables: dict[str, Variable], names: list[str]) -> int:
    return sum(variables[name].type.nbytes for name in names)
