"""Describe a step and its update as one function, for some values of the hyperparameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ipu_dynamo.errors import ProgramError
from ipu_dynamo.ops.updates.update_functions import LEFT_OUT
from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.update_instructions import Update
from ipu_dynamo.program.ir.update_rules import Rule, TracedRule

Hyperparameters = Sequence[Sequence[float]]  # of each update group, in its rule's order
Zeros = frozenset[tuple[int, str]]  # the hyperparameters that are zero and left out: group and name


@dataclass(frozen=True, slots=True)
class Fused:
    """A whole step as a function.

    Args:
        function: takes the values of `state`, `constants`, `received` and `hyperparameters` in
            this order, and returns the new values of `state`, then those of `sent`.
        state: variables that the step changes.
        constants: variables that it only reads.
        received: names that the loop receives.
        hyperparameters: hyperparameters that are not left out, by group and name: 0-dim tensors.
        sent: the value of every output stream, by the stream's name.
        zeros: hyperparameters that are left out.

    Raises:
        ProgramError: the function returns another dtype or shape for a variable of `state`.
    """

    function: Function
    state: tuple[str, ...]
    constants: tuple[str, ...]
    received: tuple[str, ...]
    hyperparameters: tuple[tuple[int, str], ...]
    sent: tuple[str, ...]
    zeros: Zeros

    def __post_init__(self) -> None:
        function = self.function
        for name, old, new in zip(self.state, function.inputs, function.outputs, strict=False):
            if old != new:
                raise ProgramError(f"@{function.name} writes {new} to %{name}, which is {old}")


def rules_of(program: Program) -> dict[int, Rule]:
    """The rule of each update group."""
    return {i.group: i.rule for i in program.walk() if isinstance(i, Update)}


def zeros_of(rules: Mapping[int, Rule], hyperparameters: Hyperparameters) -> Zeros:
    """The hyperparameters that are left out; none where they are not known yet.

    Args:
        rules: of update groups.
    """
    if not hyperparameters:
        return frozenset()
    return frozenset(
        (group, name)
        for group, rule in rules.items()
        if not isinstance(rule, TracedRule)  # traced functions use all their inputs
        for name, value in zip(rule.hyperparameters, hyperparameters[group], strict=True)
        if float(value) == 0.0 and name in LEFT_OUT
    )
