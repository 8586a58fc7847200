"""Plan the steps of an epoch: how many there are, and how many an execution has."""

import warnings
from dataclasses import dataclass

from ipu_dynamo.program.ir.types import counted


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps of one epoch; a step is one batch on every replica.

    Args:
        steps: of an epoch.
        per_execution: of one execution; a divisor of `steps`.
        replicas: batches of a step.
        goes_on: the user gave the number, so an epoch goes on in the data where the one before
            ended; else each begins the data anew.
    """

    steps: int
    per_execution: int
    replicas: int
    goes_on: bool

    @property
    def batches(self) -> int:
        """Batches of an epoch, over all replicas."""
        return self.steps * self.replicas

    @property
    def batches_per_execution(self) -> int:
        """Batches that one execution takes, over all replicas."""
        return self.per_execution * self.replicas


def plan_steps(
    *, argument: str, number: int | None, size: int | None, per_execution: int, replicas: int
) -> StepPlan:
    """Divide batches into steps and executions.

    Args:
        argument: the name of the number's argument, for messages.
        number: batches of an epoch over all replicas, as the user gave it.
        size: batches of the data; None if unknown.
        per_execution: `steps_per_execution` of the model.
        replicas: how many there are.

    Raises:
        ValueError: there is no number, no whole step, or no whole number of executions.
    """
    if number is not None and number < 1:
        raise ValueError(f"{argument} is {number}: give at least 1, or leave it out for all data")
    batches = size if number is None else number
    if batches is None:
        raise ValueError(
            f"the data does not say how many batches it has, so you must specify the number of "
            f"steps: pass {argument}="
        )
    steps, remainder = divmod(batches, replicas)
    if not steps:
        raise ValueError(
            f"{counted(batches, 'batch', 'batches')} cannot be divided among {replicas} replicas, "
            f"which take one each in every step: give at least {replicas} batches"
        )
    if remainder:
        warnings.warn(
            f"{batches} batches among {replicas} replicas are {steps} steps; the remaining "
            f"{remainder} are left out",
            stacklevel=3,
        )
    if per_execution > steps:
        warnings.warn(
            f"steps_per_execution is {per_execution}, and an epoch has "
            f"{counted(steps, 'step', 'steps')}: {steps} is used in this call",
            stacklevel=3,
        )
        per_execution = steps
    if steps % per_execution:
        raise ValueError(
            f"steps_per_execution, which is {per_execution}, must be a divisor of the number of "
            f"steps in an epoch, which is {steps}: choose another {argument}, batch_size or "
            "steps_per_execution"
        )
    return StepPlan(steps, per_execution, replicas, goes_on=number is not None)
