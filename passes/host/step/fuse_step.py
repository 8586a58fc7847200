"""Fuse a small training step and its update into one pure function: variables in, new ones out.

Before   (%loss) = call @step0(%w, %x, !%w..grad);  update group 0 sgd (%w by %w..grad)
         or (%lr') = factors @factors(%count);  update group 0 traced @piece (%w by %w..grad)
After    %w', %loss = whole_step0(%w, %x, %lr): the operators of the call, then those of the update
         on the gradients that they compute. The operator of a rule, such as ipu.sgd, is written as
         its decomposition
Keeps    values but for the order of roundings in the update. Values that depend on numbers alone
         are computed once a step. No accumulator is written, no operator of the update is launched,
         and until the call ends no variable changes.
Source   our own; the whole step under one `jit`, as in JAX.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import owner
from ipu_dynamo.ops.updates.update_operators import DECOMPOSITIONS
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.builder import call_on
from ipu_dynamo.passes.host.step.fusing_costs import (
    called_function,
    factors_of,
    fusing_costs,
    stores,
    why_not_fused,
)
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import (
    Decision,
    Function,
    HostProgram,
    JointUpdate,
    Plain,
    Program,
    Send,
    TensorType,
    Update,
    UpdateFactors,
    UpdatePart,
    Variable,
    graph_outputs,
    make_function,
)
from ipu_dynamo.program.fused import Fused, Hyperparameters, Zeros, rules_of, zeros_of
from ipu_dynamo.program.ir.rule_function import NUMBER, function_at
from ipu_dynamo.program.schedule.estimated_times import on_cpu
from ipu_dynamo.program.schedule.sections import sections

Values = dict[str, fx.Node]
Group = tuple[int, str]  # the number of an update group, and the name of a hyperparameter


class FuseStep(Pass):
    """The pass.

    Args:
        compiles: functions are compiled, and not run operator by operator.
        hyperparameters: hyperparameters that the function is made for.
        forced: whether to fuse, regardless of the gain.
    """

    level = "host"
    choices = (True, False)

    compiles: bool = True
    hyperparameters: Hyperparameters = ()
    forced: bool | None = None

    def applies(self, host: HostProgram, contents: Contents) -> bool:
        return host.program.kind == "training"

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        program = host.inlined
        if program.kind != "training":
            return False
        reason = why_not_fused(program)
        if self.forced and reason is not None:
            raise CompileError(
                f"a step and its update cannot be one function: {reason}",
                hint="leave FuseStep out of the forced decisions",
            )
        if self.forced is not None:
            fuses, reason = self.forced, "it is forced"
        elif reason is None and not self.compiles:
            fuses, reason = False, "functions run operator by operator"
        elif reason is None and not on_cpu(program):
            fuses, reason = False, "it runs on a device"
        elif reason is None:
            costs = fusing_costs(program)
            fuses, reason = costs.worth, str(costs)
        else:
            fuses = False
        choice = "fused" if fuses else "not fused"
        host = host.deciding(Decision(self.name, choice, reason))
        if not fuses:
            return host
        zeros = zeros_of(rules_of(program), self.hyperparameters)
        return replace(host, fused=fuse(program, zeros))


def fuse(program: Program, zeros: Zeros) -> Fused:
    """The step as one function without the hyperparameters `zeros`; see `why_not_fused`."""
    return _Fusing(program).fuse(zeros)


class _Fusing:
    """Writes the graph of a whole step.

    Invariant: `values` has a node of `graph` for every variable and received value, the newest.
    """

    def __init__(self, program: Program) -> None:
        (self.call,) = program.calls
        self.program, self.function = program, called_function(program)
        cut = sections(program)
        self.after, self.factors = cut.after, factors_of(cut.before)
        self.updates = [i for i in cut.after if isinstance(i, Update)]
        self.gradient_of = {  # of parameters and of their states
            name: gradient
            for update in self.updates
            for names in (update.parameters, *(names for _, names in update.states))
            for name, gradient in zip(names, update.gradients, strict=True)
        }
        self.graph = fx.Graph()
        self.values: dict[str, fx.Node] = {}

    def fuse(self, zeros: Zeros) -> Fused:
        placeholders = self.function.graph.graph.find_nodes(op="placeholder")
        inputs = dict(zip(self.call.arguments, placeholders, strict=True))
        variables = {v.name: v for v in self.program.variables}
        written_here = {self.call.arguments[i] for i in self.function.written}
        accumulators = {g for u in self.updates for g in u.gradients}
        changed = {n for u in self.updates for n in (*u.parameters, *_states_of(u))}
        changed |= written_here - accumulators
        changed |= {*_written_by(self.after, self.factors)}
        state = tuple(name for name in variables if name in changed)
        read = dict.fromkeys((*inputs, *_read_by(self.after)))
        constants = tuple(n for n in read if n in variables and n not in changed | accumulators)
        received = tuple(name for name in inputs if name not in variables)
        for name in (*state, *constants, *received):
            self.values[name] = self.take(name, inputs, variables)
        hyperparameters = _hyperparameters_of(self.program, self.updates, self.factors, zeros)
        of_hyperparameters = {
            pair: self.number(*pair, of.dtype) for pair, of in hyperparameters.items()
        }
        old = dict(self.values)
        results, gradients = self.compute(inputs)
        for update in self.updates:
            self.divide(update, gradients)
        writer = _UpdateWriter(self.program, self.graph, old, gradients, of_hyperparameters)
        self.values |= writer.write(self.factors, self.after)
        sends = {i.stream: i.value for i in self.program.walk() if isinstance(i, Send)}
        sent = tuple(sends[output.name] for output in self.program.outputs)
        outputs = [self.own(self.values[name], old[name]) for name in state]
        self.graph.output((*outputs, *(results[name] for name in sent)))
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        function = make_function(f"whole_{self.function.name}", module)
        return Fused(function, state, constants, received, tuple(hyperparameters), sent, zeros)

    def take(
        self, name: str, inputs: Mapping[str, fx.Node], variables: Mapping[str, Variable]
    ) -> fx.Node:
        """Add a placeholder; one that only the update reads has an accumulator's layout."""
        node = self.graph.placeholder(f"a{len(self.values)}")
        if name in inputs:
            node.meta["val"] = inputs[name].meta["val"]
            return node
        type_, gradient = variables[name].type, self.gradient_of.get(name)
        like: torch.Tensor = inputs[gradient or self.updates[0].gradients[0]].meta["val"]
        if gradient is not None and type_.shape == tuple(like.shape):
            node.meta["val"] = torch.empty_like(like, dtype=type_.dtype)
        else:
            node.meta["val"] = like.new_empty(type_.shape, dtype=type_.dtype)
        return node

    def number(self, group: int, name: str, dtype: torch.dtype) -> fx.Node:
        """A placeholder for a hyperparameter."""
        node = self.graph.placeholder(f"{name.replace('.', '_')}_of_group{group}")
        like = next(iter(self.values.values())).meta["val"]
        node.meta["val"] = like.new_empty((), dtype=dtype)
        return node

    def divide(self, update: Update, gradients: dict[str, fx.Node]) -> None:
        """Divide the gradients of an update as its equations need them."""
        if update.divisor != 1:
            for total in update.gradients:
                gradients[total] = call_on(
                    self.graph, aten.div.Tensor, gradients[total], update.divisor
                )

    def compute(self, inputs: Mapping[str, fx.Node]) -> tuple[dict[str, Any], dict[str, fx.Node]]:
        """Copy the operators; return results and gradients by name, and renew `values`."""
        names = {node: name for name, node in inputs.items()}
        copies = {node: self.values[name] for name, node in inputs.items() if name in self.values}
        gradients = {}
        for node in self.function.operators:
            if stores(node) and node.args[0] in names:
                name, value = names[node.args[0]], self.stored(node, copies)  # type: ignore[index]
                if name in self.values:
                    self.values[name] = value
                else:
                    gradients[name] = value
                continue
            copies[node] = self.graph.node_copy(node, copies.__getitem__)
        (output,) = self.function.graph.graph.find_nodes(op="output")
        pairs = zip(self.call.results, output.args[0], strict=True)
        return {n: node and copies[node] for n, node in pairs if n}, gradients

    def stored(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Return the value that an operator stores."""
        if node.target is aten.copy_.default:
            return copies[node.args[1]]  # type: ignore[index]
        a, b = node.args[2:]
        product = call_on(self.graph, aten.mm.default, copies[a], copies[b])  # type: ignore[index]
        product.meta = node.meta | {"val": product.meta["val"]}
        return product

    def own(self, new: fx.Node, old: fx.Node) -> fx.Node:
        """Return the result for a variable: in its own memory, with the variable's layout."""
        if owner(new).op == "placeholder":
            new = call_on(self.graph, aten.clone.default, new)
        if new.meta["val"].stride() != old.meta["val"].stride():
            node = self.graph.call_function(aten.clone.default, (new,))
            node.meta["val"] = torch.empty_like(old.meta["val"])
            return node
        return new


def _states_of(update: Update) -> list[str]:
    return [name for _, names in update.states for name in names]


def _hyperparameters_of(
    program: Program, updates: Sequence[Update], factors: UpdateFactors | None, zeros: Zeros
) -> dict[Group, TensorType]:
    """The hyperparameters that updates take, with their types: of rules all but `zeros`."""
    taken = {}
    if factors is not None:
        types = program.update_function(factors.function).inputs
        pairs = zip(factors.hyperparameters, types, strict=False)
        taken = {(group, name): type_ for (group, _, name), type_ in pairs}
    rules = [u for u in updates if u.function is None]
    named = [(u.group, name) for u in rules for name in u.rule.hyperparameters]
    return taken | dict.fromkeys((pair for pair in named if pair not in zeros), NUMBER)


def _written_by(after: Sequence[Plain], factors: UpdateFactors | None) -> tuple[str, ...]:
    """Variables of no parameter that updates change."""
    joint = [name for i in after if isinstance(i, JointUpdate) for name in i.written]
    return (*(() if factors is None else factors.counters), *joint)


def _read_by(after: Sequence[Plain]) -> tuple[str, ...]:
    """The values and variables that joint parts of updates take."""
    return tuple(n for i in after if isinstance(i, JointUpdate) for n in i.arguments)


@dataclass(frozen=True)
class _UpdateWriter:
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
            function = self.program.update_function(factors.function)
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
        made = self._called(self.program.update_function(part.function), arguments)
        return dict(zip(part.results, map(self._once, made), strict=True))

    def _joint(self, joint: JointUpdate, known: Values, new: Values) -> None:
        arguments = [known[n] if n in known else self.old[n] for n in joint.arguments]
        made = self._called(self.program.update_function(joint.function), arguments)
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

        Inductor stores a value in memory if it is given strides for it.
        """
        if value.meta["val"].dim() or owner(value).op == "placeholder":
            return value
        return call_on(self.graph, aten.as_strided.default, value, [], [])
