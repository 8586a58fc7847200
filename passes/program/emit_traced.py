"""Write the updates that were traced from an optimiser's Python.

Before   a program that leaves gradients in accumulators, and groups whose rule was traced
After    the end of a step as `EmitUpdate` writes it, with an update for the parameters that one
         function updates. Before the micro-batches are the numbers that it takes, and after them
         copies of the numbers to the IPUs of the parameters.
         If parameters depend on each other, their joint values are computed in rounds
Keeps    the order of parameters. States are variables, named by their parameter. Equal counters of
         a step are one variable.
Source   design of this project: optimisers that PopTorch has no rule for run as they are written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ipu_dynamo.errors import CompileError
from ipu_dynamo.options import Options
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.program.emit_update import UpdateGroup, trained, with_updates
from ipu_dynamo.program import (
    Copy,
    JointUpdate,
    ParameterPart,
    Program,
    Round,
    TensorType,
    TracedStep,
    Update,
    UpdateFactors,
    UpdatePart,
    Variable,
)
from ipu_dynamo.program.ir.instructions import Plain
from ipu_dynamo.program.ir.made_names import on_ipu, state
from ipu_dynamo.program.schedule.sections import sections, with_sections


class WithoutGradient(CompileError):
    """Parameters have no gradient, and an update is traced that takes those of all together.

    Args:
        names: of the parameters.
    """

    id = "update"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(f"the loss does not depend on {', '.join(names)}")


class EmitTracedUpdate(Pass):
    """The pass. `groups` are of the optimiser; those of rules are left to `EmitUpdate`."""

    level = "program"
    needed = "nothing would be trained"

    options: Options
    groups: Sequence[UpdateGroup] = ()

    def applies(self, program: Program, contents: Contents) -> bool:
        return any(group.trace for group in self.groups)

    def __call__(self, program: Program) -> Program:
        """Write the end of the step.

        Raises:
            WithoutGradient: the step takes the gradients of all parameters together, and some have
                none.
        """
        trace = next((group.trace for group in self.groups), None)
        if trace is None or program.kind != "training":
            return program
        functions = (trace.factors, *trace.pieces.values())
        program = replace(program, update_functions=functions)
        owners = {parameter.name: parameter.ipu for parameter in trained(program)}
        if not owners:
            return program
        without = sorted(trace.functions.keys() - owners.keys())
        if trace.rounds and without:
            raise WithoutGradient(without)
        form = TracedForm(trace, self.groups, owners, self.options)
        program = with_sections(program, before=[form.factors(), *sections(program).before])
        return with_updates(program, self.options, self.groups, form)


@dataclass(frozen=True)
class TracedForm:
    """The updates of a traced step, an `UpdateForm`.

    Args:
        groups: of the optimiser.
        owners: of the trained parameters.
    """

    trace: TracedStep
    groups: Sequence[UpdateGroup]
    owners: Mapping[str, int]
    options: Options

    @property
    def owner(self) -> int:
        """Where the counters are, and numbers are computed."""
        return min(self.owners.values())

    def variables(self) -> list[Variable]:
        """The states and the counters."""
        trace = self.trace
        states = [
            Variable(state(name, key), type_, "state", self.owners[name])
            for name, own in trace.states.items()
            if name in self.owners
            for key, type_ in own
        ]
        free = [*((c.name, c.type) for c in trace.counters), *trace.shared]
        return states + [Variable(name, type_, "state", self.owner) for name, type_ in free]

    def factors(self) -> UpdateFactors:
        """The instruction that computes the numbers."""
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
            self.owner,
        )

    def split(self, update: Update) -> list[Update]:
        """An update by the functions of its parameters."""
        by_function: dict[str, list[int]] = {}
        for place, name in enumerate(update.parameters):
            self._check_groups(name)
            by_function.setdefault(self.trace.functions[name], []).append(place)
        return [self._of(function, update, of) for function, of in by_function.items()]

    def _of(self, function: str, update: Update, places: Sequence[int]) -> Update:
        names = tuple(update.parameters[place] for place in places)
        keys = [key for key, _ in self.trace.states[names[0]]]
        return replace(
            update,
            parameters=names,
            gradients=tuple(update.gradients[place] for place in places),
            states=tuple((key, tuple(state(name, key) for name in names)) for key in keys),
            function=function,
            numbers=tuple(
                tuple(self._known_as(number, update.ipu) for number in self.trace.arguments[name])
                for name in names
            ),
            once=self.trace.once,
        )

    def _known_as(self, number: str, ipu: int) -> str:
        return number if ipu == self._makers.get(number, self.owner) else on_ipu(number, ipu)

    @cached_property
    def _makers(self) -> dict[str, int]:
        """Return the IPUs of values that parameters compute for others; others are from `owner`."""
        return {
            value: self.owners[name]
            for turn in self.trace.rounds
            for name, part in turn.parts.items()
            for value in part.results
        }

    def copies(self, updates: Sequence[Update]) -> list[Plain]:
        """The copies to other IPUs of numbers that are known before the step."""
        types = dict(zip(self.trace.results, self.trace.factors.outputs, strict=False))
        readers = [(u.ipu, name) for u in updates if u.ipu != self.owner for name in u.parameters]
        copied: dict[tuple[str, int], TensorType] = {}
        for ipu, name in readers:
            parts = [turn.parts[name] for turn in self.trace.rounds if name in turn.parts]
            for number in (*self.trace.arguments[name], *(n for p in parts for n in p.arguments)):
                type_ = types.get(number)
                if type_ is not None:
                    copied[number, ipu] = type_
        return [
            Copy(number, on_ipu(number, ipu), type_, self.owner, ipu, "numbers of the update")
            for (number, ipu), type_ in copied.items()
        ]

    def rounds(self, updates: Sequence[Update]) -> list[Plain]:
        """The instructions by which parameters depend on each other."""
        if not self.trace.rounds:
            return []
        update_of = {name: (u, i) for u in updates for i, name in enumerate(u.parameters)}
        made: list[Plain] = []
        for turn in self.trace.rounds:
            made += [self._part(part, *update_of[name]) for name, part in turn.parts.items()]
            for name, part in turn.parts.items():
                ipu = self.owners[name]
                if ipu != self.owner:
                    types = self.trace.pieces[part.function].outputs
                    made += _copies(part.results, types, ipu, self.owner)
            made.append(self._joint(turn))
            types = self.trace.pieces[turn.function].outputs
            for ipu in sorted({*self.owners.values()} - {self.owner}):
                made += _copies(turn.results, types, self.owner, ipu)
        return made

    def _part(self, part: ParameterPart, update: Update, place: int) -> UpdatePart:
        name = update.parameters[place]
        types = self.trace.pieces[part.function].outputs
        return UpdatePart(
            part.function,
            name,
            update.gradients[place],
            tuple(names[place] for _, names in update.states),
            tuple(self._known_as(number, update.ipu) for number in part.arguments),
            part.results,
            _present(types),
            update.divisor,
            update.ipu,
            update.loss_scale,
            update.clip,
        )

    def _joint(self, turn: Round) -> JointUpdate:
        types = self.trace.pieces[turn.function].outputs[: len(turn.results)]
        arguments = tuple(self._known_as(name, self.owner) for name in turn.arguments)
        return JointUpdate(
            turn.function, arguments, turn.results, _present(types), turn.written, self.owner
        )

    def _check_groups(self, name: str) -> None:
        if name in self.options.replica_groups:
            raise CompileError(
                f"{name} is one of each group of replicas, and its update is traced for the whole",
                hint="leave it out of replica_groups, or use SGD, Adam, AdamW or RMSprop",
                id="update",
            )


def _copies(
    names: Sequence[str], types: Sequence[TensorType | None], src: int, dst: int
) -> list[Plain]:
    pairs = zip(names, types, strict=False)
    return [
        Copy(name, on_ipu(name, dst), type_, src, dst, "numbers of the update")
        for name, type_ in pairs
        if type_ is not None
    ]


def _present(types: Sequence[TensorType | None]) -> tuple[TensorType, ...]:
    return tuple(type_ for type_ in types if type_ is not None)


def check_shards(end: Sequence[Plain], trace: TracedStep) -> None:
    """Raise where functions of a trace cannot update a parameter in shards.

    Args:
        end: of a step.
    """
    hint = "leave weights and optimizer_state whole, with sharded=False"
    updates = [step for step in end if isinstance(step, Update)]
    for update in updates:
        if update.sharded and update.function not in trace.elementwise:
            raise CompileError(
                f"the optimizer updates {update.sharded[0]} as a whole, and locations has it, or "
                "its state, in shards",
                hint=hint,
                id="update",
            )
    sharded = {name for update in updates for name in update.sharded}
    for part in end:
        if isinstance(part, UpdatePart) and part.parameter in sharded:
            raise CompileError(
                f"the optimizer computes of the whole of {part.parameter} what it updates others "
                "by, and locations has it, or its state, in shards",
                hint=hint,
                id="update",
            )
