"""Write the updates that were traced from an optimiser's Python.

Before   an update for all parameters of a group on an IPU, by a rule that names its functions
After    one for those that one function updates; before the micro-batches the numbers that they
         take, and copies of these to the IPUs of their parameters
Keeps    the order of parameters. States are variables, named by their parameter; what a step counts
         is one variable for all that count alike.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ipu_dynamo.errors import CompileError
from ipu_dynamo.options import Options
from ipu_dynamo.passes.program.offload_variables import Located, in_shards
from ipu_dynamo.program import (
    Copy,
    Instruction,
    TensorType,
    TracedStep,
    Update,
    UpdateFactors,
    Variable,
)
from ipu_dynamo.program.ir.instructions import on_ipu
from ipu_dynamo.program.ir.update_rules import Rule


class _Group(Protocol):
    @property
    def rule(self) -> Rule: ...


@dataclass(frozen=True)
class TracedEnd:
    """The part of a step's end that a traced update needs.

    Args:
        groups: of the optimiser.
        owners: of the trained parameters.
    """

    trace: TracedStep
    groups: Sequence[_Group]
    owners: Mapping[str, int]
    options: Options

    @property
    def home(self) -> int:
        """Where the counters are, and numbers are computed."""
        return min(self.owners.values())

    def variables(self, trained: Collection[str]) -> list[Variable]:
        """The states and the counters."""
        trace = self.trace
        states = [
            Variable(f"{name}.{key}", type_, "state", self.owners[name])
            for name, own in trace.states.items()
            if name in trained
            for key, type_ in own
        ]
        return states + [Variable(c.name, c.type, "state", self.home) for c in trace.counters]

    def factors(self) -> UpdateFactors:
        """What computes the numbers."""
        trace = self.trace
        places = {
            (index, name): place
            for index, group in enumerate(self.groups)
            for place, name in enumerate(group.rule.hyperparameters)
        }
        types = trace.factors.outputs[: len(trace.results)]
        return UpdateFactors(
            trace.factors.name,
            tuple((group, places[group, name], name) for group, name in trace.hyperparameters),
            tuple(counter.name for counter in trace.counters),
            trace.results,
            tuple(type_ for type_ in types if type_ is not None),
            self.home,
        )

    def split(self, update: Update, located: Located) -> list[Update]:
        """An update by the functions of its parameters."""
        by_function: dict[str, list[int]] = {}
        for place, name in enumerate(update.parameters):
            self._check_groups(name)
            by_function.setdefault(self.trace.functions[name], []).append(place)
        return [self._of(function, update, of, located) for function, of in by_function.items()]

    def _of(self, function: str, update: Update, places: Sequence[int], located: Located) -> Update:
        names = tuple(update.parameters[place] for place in places)
        keys = [key for key, _ in self.trace.states[names[0]]]
        part = replace(
            update,
            parameters=names,
            gradients=tuple(update.gradients[place] for place in places),
            states=tuple((key, tuple(f"{name}.{key}" for name in names)) for key in keys),
            function=function,
            numbers=tuple(
                tuple(self._known_as(number, update.ipu) for number in self.trace.arguments[name])
                for name in names
            ),
            once=self.trace.once,
        )
        part = in_shards(part, located)
        if part.sharded and function not in self.trace.elementwise:
            raise CompileError(
                f"the optimizer updates {part.sharded[0]} as a whole, and locations has it, or its "
                "state, in shards",
                hint="leave weights and optimizer_state whole, with sharded=False",
                id="update",
            )
        return part

    def _known_as(self, number: str, ipu: int) -> str:
        return number if ipu == self.home else on_ipu(number, ipu)

    def copies(self, updates: Sequence[Update]) -> list[Instruction]:
        """The copies of numbers to other IPUs."""
        types = dict(zip(self.trace.results, self.trace.factors.outputs, strict=False))
        found: dict[tuple[str, int], TensorType] = {}
        for update in updates:
            if update.ipu != self.home:
                for name in update.parameters:
                    for number in self.trace.arguments[name]:
                        type_ = types[number]
                        assert type_ is not None
                        found[number, update.ipu] = type_
        return [
            Copy(number, on_ipu(number, ipu), type_, self.home, ipu, "numbers of the update")
            for (number, ipu), type_ in found.items()
        ]

    def _check_groups(self, name: str) -> None:
        if name in self.options.replica_groups:
            raise CompileError(
                f"{name} is one of each group of replicas, and its update is traced for the whole",
                hint="leave it out of replica_groups, or use SGD, Adam, AdamW or RMSprop",
                id="update",
            )
