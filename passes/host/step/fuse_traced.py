"""Write an update that was traced from an optimiser's Python into the graph of a whole step.

Before   (%lr') = factors @factors(%count);  update group 0 traced @piece (%w by %w..grad)
After    the operators of both, on the gradients that the graph computes
Keeps    values; what numbers alone decide is computed once a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import map_arg

from ipu_dynamo.ops.graph_queries import owner
from ipu_dynamo.passes.host.step.update_graphs import Writer
from ipu_dynamo.program import (
    Function,
    JointUpdate,
    Plain,
    Program,
    TensorType,
    Update,
    UpdateFactors,
    UpdatePart,
    graph_outputs,
)

aten = torch.ops.aten
Values = dict[str, fx.Node]
Group = tuple[int, str]  # the number of an update group, and the name of a hyperparameter


def factors_of(before: Sequence[Plain]) -> UpdateFactors | None:
    """The instruction that computes what a traced update takes of numbers, if there is one."""
    return next((i for i in before if isinstance(i, UpdateFactors)), None)


def why_not_traced(program: Program, factors: UpdateFactors) -> str | None:
    """What keeps a traced update from being part of a function, in words; None: nothing does.

    Of each step it has to be known before that this is the update that was traced for its numbers.
    """
    trained = {i.group for i in program.walk() if isinstance(i, Update)}
    if any(group not in trained for group, *_ in factors.hyperparameters):
        return "the traced update takes numbers of a group in which nothing is trained"
    graph = _function(program, factors.function).graph
    numbers = graph.graph.find_nodes(op="placeholder")[: len(factors.hyperparameters)]
    if any(n.users and not n.meta["val"].dtype.is_floating_point for n in numbers):
        return "the traced update takes a whole number"
    holds = graph_outputs(graph)[-1]
    if holds.target is not aten.ones.default:
        return "the update was traced for some values of its numbers, which each step looks at"
    return None


def takes_as_they_are(program: Program, update: Update, types: Mapping[str, TensorType]) -> bool:
    """Whether a function takes and returns its variables in their own types.

    It takes those in half precision as float32.
    """
    assert update.function is not None
    function = _function(program, update.function)
    weight, gradient, *_ = function.inputs
    pairs = ((update.parameters, weight), (update.gradients, gradient))
    same = all(types[name].dtype == of.dtype for names, of in pairs for name in names)
    return same and function.outputs[0] == weight


def calls_of(after: Sequence[Plain]) -> int:
    """How often functions of a traced update are called in a step."""
    pieces = [len(i.parameters) for i in after if isinstance(i, Update) and i.function]
    joint = [i for i in after if isinstance(i, UpdatePart | JointUpdate)]
    return sum(pieces) + len(joint) + bool(pieces)


def hyperparameters_of(program: Program, factors: UpdateFactors) -> dict[Group, TensorType]:
    """The hyperparameters that a traced update takes, with their types."""
    types = _function(program, factors.function).inputs
    pairs = zip(factors.hyperparameters, types, strict=False)
    return {(group, name): type_ for (group, _, name), type_ in pairs}


def written_by(after: Sequence[Plain], factors: UpdateFactors) -> tuple[str, ...]:
    """Variables of no parameter that a traced update changes."""
    joint = [name for i in after if isinstance(i, JointUpdate) for name in i.written]
    return (*factors.counters, *joint)


def read_by(after: Sequence[Plain]) -> tuple[str, ...]:
    """What is computed of several parameters together takes these, values and variables."""
    return tuple(n for i in after if isinstance(i, JointUpdate) for n in i.arguments)


@dataclass(frozen=True)
class TracedWriter:
    """Writes a traced update.

    Args:
        graph: of the step.
        old: the values of variables before the step.
        gradients: by accumulator.
        hyperparameters: by group and name.
    """

    program: Program
    graph: fx.Graph
    old: Mapping[str, fx.Node]
    gradients: Mapping[str, fx.Node]
    hyperparameters: Mapping[Group, fx.Node]

    def write(self, factors: UpdateFactors, after: Sequence[Plain]) -> Values:
        """Write all of it; the new values of the variables that it changes."""
        numbers = [self.hyperparameters[group, name] for group, _, name in factors.hyperparameters]
        counters = [self.old[name] for name in factors.counters]
        made = self._called(factors.function, [*numbers, *counters])
        count = len(factors.results)
        known = dict(zip(factors.results, map(self._once, made[:count]), strict=True))
        new = dict(zip(factors.counters, made[count:-1], strict=True))
        for instruction in after:
            match instruction:
                case UpdatePart():
                    known |= self._part(instruction, known)
                case JointUpdate():
                    self._joint(instruction, known, new)
                case Update(function=str()):
                    self._update(instruction, known, new)
                case _:
                    raise ValueError(f"no part of a traced update: {instruction}")
        return new

    def _part(self, part: UpdatePart, known: Mapping[str, fx.Node]) -> Values:
        arguments = self._arguments(part.parameter, part.gradient, part.states, part.numbers, known)
        return dict(zip(part.results, map(self._once, self._called(part.function, arguments)),
                        strict=True))  # fmt: skip

    def _joint(self, joint: JointUpdate, known: Values, new: Values) -> None:
        arguments = [known[n] if n in known else self.old[n] for n in joint.arguments]
        made = self._called(joint.function, arguments)
        count = len(joint.results)
        known |= zip(joint.results, map(self._once, made[:count]), strict=True)
        new |= zip(joint.written, made[count:], strict=True)

    def _update(self, update: Update, known: Mapping[str, fx.Node], new: Values) -> None:
        assert update.function is not None
        for place, name in enumerate(update.parameters):
            states = tuple(names[place] for _, names in update.states)
            gradient, numbers = update.gradients[place], update.numbers[place]
            arguments = self._arguments(name, gradient, states, numbers, known)
            new |= zip((name, *states), self._called(update.function, arguments), strict=True)

    def _arguments(
        self,
        parameter: str,
        gradient: str,
        states: Sequence[str],
        numbers: Sequence[str],
        known: Mapping[str, fx.Node],
    ) -> list[fx.Node]:
        weight, value = self.old[parameter], self.gradients[gradient]
        if weight.meta["val"].stride() != value.meta["val"].stride():  # the update may view it
            writer = Writer(self.graph)
            like = writer.call(aten.empty_like.default, weight)
            value = writer.call(aten.copy.default, like, value)
        return [
            weight,
            value,
            *(self.old[name] for name in states),
            *(known[name] for name in numbers),
        ]

    def _called(self, name: str, arguments: Sequence[fx.Node]) -> list[fx.Node]:
        """Copy the operators of a function; its results."""
        graph = _function(self.program, name).graph
        placeholders = graph.graph.find_nodes(op="placeholder")
        copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, arguments, strict=True))
        writer = Writer(self.graph)
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            if not node.all_input_nodes:
                copies[node] = self.graph.node_copy(node)
                continue
            # not as it was traced: the gradient may have another layout here
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = writer.call(node.target, *args, **kwargs)
            copies[node].meta = {**node.meta, "val": copies[node].meta["val"]}
        return [copies[node] for node in graph_outputs(graph)]

    def _once(self, value: fx.Node) -> fx.Node:
        """A number in memory, which a loop over elements would compute in every turn."""
        if value.meta["val"].dim() or owner(value).op == "placeholder":
            return value
        return Writer(self.graph).once(value)


def _function(program: Program, name: str) -> Function:
    return next(function for function in program.update_functions if function.name == name)
