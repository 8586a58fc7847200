"""Write updates into the graph of a whole step.

Before   (%lr') = factors @factors(%count);  update group 0 traced @piece (%w by %w..grad)
         or update group 0 sgd() (%w by %w..grad)
After    the operators of their functions, on the gradients that the graph computes; the operator
         of a rule, such as ipu.sgd, is written as its decomposition
Keeps    values, except for the order of roundings in a rule. Values that depend on numbers alone
         are computed once a step.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import owner
from ipu_dynamo.ops.updates.update_operators import DECOMPOSITIONS
from ipu_dynamo.passes.graph.builder import call_on
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
from ipu_dynamo.program.fused import Zeros
from ipu_dynamo.program.ir.rule_function import NUMBER, function_at

Values = dict[str, fx.Node]
Group = tuple[int, str]  # the number of an update group, and the name of a hyperparameter


def factors_of(before: Sequence[Plain]) -> UpdateFactors | None:
    """The instruction that computes the numbers of a traced update, if there is one."""
    return next((i for i in before if isinstance(i, UpdateFactors)), None)


def why_not_traced(program: Program, factors: UpdateFactors) -> str | None:
    """The reason why a traced update cannot be part of a function; None: it can.

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

    A traced one takes those in half precision as float32. A rule's rounds each value that it
    computes, and its kernel only the last ones: they agree in float32.
    """
    if update.function is None:
        columns = (update.parameters, update.gradients, *(names for _, names in update.states))
        return all(types[name].dtype == torch.float32 for names in columns for name in names)
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


def hyperparameters_of(
    program: Program, updates: Sequence[Update], factors: UpdateFactors | None, zeros: Zeros
) -> dict[Group, TensorType]:
    """The hyperparameters that updates take, with their types: of rules all but `zeros`."""
    taken = {}
    if factors is not None:
        types = _function(program, factors.function).inputs
        pairs = zip(factors.hyperparameters, types, strict=False)
        taken = {(group, name): type_ for (group, _, name), type_ in pairs}
    rules = [u for u in updates if u.function is None]
    named = [(u.group, name) for u in rules for name in u.rule.hyperparameters]
    return taken | dict.fromkeys((pair for pair in named if pair not in zeros), NUMBER)


def written_by(after: Sequence[Plain], factors: UpdateFactors | None) -> tuple[str, ...]:
    """Variables of no parameter that updates change."""
    joint = [name for i in after if isinstance(i, JointUpdate) for name in i.written]
    return (*(() if factors is None else factors.counters), *joint)


def read_by(after: Sequence[Plain]) -> tuple[str, ...]:
    """The values and variables that joint parts of updates take."""
    return tuple(n for i in after if isinstance(i, JointUpdate) for n in i.arguments)


@dataclass(frozen=True)
class UpdateWriter:
    """Writes the updates of a step.

    Args:
        graph: of the step.
        old: the values of variables before the step.
        gradients: by accumulator, as the updates take them.
        hyperparameters: by group and name; of rules, those that are not zero.
    """

    program: Program
    graph: fx.Graph
    old: Mapping[str, fx.Node]
    gradients: Mapping[str, fx.Node]
    hyperparameters: Mapping[Group, fx.Node]

    def write(self, factors: UpdateFactors | None, after: Sequence[Plain]) -> Values:
        """Write all of them; the new values of the variables that they change."""
        known: Values = {}
        new: Values = {}
        if factors is not None:
            taken = factors.hyperparameters
            numbers = [self.hyperparameters[group, name] for group, _, name in taken]
            counters = [self.old[name] for name in factors.counters]
            function = _function(self.program, factors.function)
            made = self._called(function, [*numbers, *counters])
            count = len(factors.results)
            known |= zip(factors.results, map(self._once, made[:count]), strict=True)
            new |= zip(factors.counters, made[count:-1], strict=True)
        for instruction in after:
            match instruction:
                case UpdatePart():
                    known |= self._part(instruction, known)
                case JointUpdate():
                    self._joint(instruction, known, new)
                case Update():
                    self._update(instruction, known, new)
                case _:
                    raise ValueError(f"no part of an update: {instruction}")
        return new

    def _part(self, part: UpdatePart, known: Mapping[str, fx.Node]) -> Values:
        arguments = self._arguments(part.parameter, part.gradient, part.states, part.numbers, known)
        made = self._called(_function(self.program, part.function), arguments)
        return dict(zip(part.results, map(self._once, made), strict=True))

    def _joint(self, joint: JointUpdate, known: Values, new: Values) -> None:
        arguments = [known[n] if n in known else self.old[n] for n in joint.arguments]
        made = self._called(_function(self.program, joint.function), arguments)
        count = len(joint.results)
        known |= zip(joint.results, map(self._once, made[:count]), strict=True)
        new |= zip(joint.written, made[count:], strict=True)

    def _update(self, update: Update, known: Mapping[str, fx.Node], new: Values) -> None:
        functions = {function.name: function for function in self.program.update_functions}
        types = {variable.name: variable.type for variable in self.program.variables}
        named = {name: self.hyperparameters.get((update.group, name))
                 for name in update.rule.hyperparameters}  # fmt: skip
        zeros = frozenset(name for name, node in named.items() if node is None)
        for place, (name, total) in enumerate(
            zip(update.parameters, update.gradients, strict=True)
        ):
            states = tuple(names[place] for _, names in update.states)
            function = function_at(update, functions, types[name], types[total], zeros)
            if update.function is None:
                numbers = [node for node in named.values() if node is not None]
                arguments = [self.old[name], self.gradients[total]]
                arguments += [*(self.old[state] for state in states), *numbers]
            else:
                arguments = self._arguments(name, total, states, update.numbers[place], known)
            new |= zip((name, *states), self._called(function, arguments), strict=True)

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
            like = call_on(self.graph, aten.empty_like.default, weight)
            value = call_on(self.graph, aten.copy.default, like, value)
        return [
            weight,
            value,
            *(self.old[name] for name in states),
            *(known[name] for name in numbers),
        ]

    def _called(self, function: Function, arguments: Sequence[fx.Node]) -> list[fx.Node]:
        """Copy the operators of a function; its results."""
        graph = function.graph
        placeholders = graph.graph.find_nodes(op="placeholder")
        copies: dict[fx.Node, Any] = dict(zip(placeholders, arguments, strict=True))
        write = partial(call_on, self.graph)
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            if not node.all_input_nodes:
                copies[node] = self.graph.node_copy(node)
                continue
            # not as it was traced: the gradient may have another layout here
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            if node.target in DECOMPOSITIONS:  # a list of nodes
                copies[node] = DECOMPOSITIONS[node.target](write, *args, **kwargs)
            elif node.target is operator.getitem and not isinstance(args[0], fx.Node):
                copies[node] = args[0][args[1]]
            else:
                copies[node] = write(node.target, *args, **kwargs)
                copies[node].meta = {**node.meta, "val": copies[node].meta["val"]}
        return [copies[node] for node in graph_outputs(graph)]

    def _once(self, value: fx.Node) -> fx.Node:
        """A number in memory, which a compiled loop over elements would compute in every turn.

        Inductor lays out in memory what strides are given for.
        """
        if value.meta["val"].dim() or owner(value).op == "placeholder":
            return value
        return call_on(self.graph, aten.as_strided.default, value, [], [])


def _function(program: Program, name: str) -> Function:
    return next(function for function in program.update_functions if function.name == name)
