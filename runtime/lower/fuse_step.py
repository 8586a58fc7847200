"""Link a small training step into one pure function: variables in, new variables out.

The calls of a step and its update, which a program keeps apart, become one graph for the compiler:
no accumulator is written, no operator of the update is launched, and until the call ends no
variable changes, so that a step that fails has changed nothing. For large updates PyTorch's fused
operators are as fast, and need no second copy of the variables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from ipu_dynamo.ops.graph_queries import owner, writes
from ipu_dynamo.program import (
    Call,
    Function,
    Program,
    Receive,
    Send,
    Update,
    UpdateFactors,
    Variable,
    make_function,
)
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.lower.update_graphs import RULES, Writer, written
from ipu_dynamo.tune.costs import LARGE_UPDATE

aten = torch.ops.aten
Zeros = frozenset[tuple[int, str]]  # the numbers that are zero and left out: group and name


@dataclass(frozen=True, slots=True)
class Linked:
    """A whole step as a function.

    Args:
        function: takes the values of `state`, `constants`, `received` and `numbers` in this order,
            and returns the new values of `state`, then those of `sent`.
        state: variables that the step changes.
        constants: variables that it only reads.
        received: names that the loop receives.
        numbers: hyper-parameters that are not left out, by group and name: 0-dim float64.
        sent: the value of every output stream, by the stream's name.
    """

    function: Function
    state: tuple[str, ...]
    constants: tuple[str, ...]
    received: tuple[str, ...]
    numbers: tuple[tuple[int, str], ...]
    sent: tuple[str, ...]


def why_not_fused(program: Program) -> str | None:
    """What keeps a step and its update from being one function, in words; None: nothing does.

    It has to be one call, and a small update of float32 numbers by known rules.
    """
    if program.kind != "training":
        return "nothing is trained"
    if program.replicas > 1:
        return f"{program.replicas} replicas"
    if program.num_ipus > 1:
        return f"{program.num_ipus} IPUs"
    cut = sections(program)
    calls = [i for i in cut.loop if isinstance(i, Call)]
    if len(calls) != 1 or cut.micro_batches != 1:
        return f"{cut.micro_batches} micro-batches a step, {len(calls)} calls each"
    if any(isinstance(i, UpdateFactors) for i in cut.before):
        return "the update is traced from the optimiser's Python"
    if cut.before or not all(isinstance(i, Receive | Call | Send) for i in cut.loop):
        return "variables or values are off the chip"
    updates = [i for i in cut.after if isinstance(i, Update)]
    if not updates or len(updates) != len(cut.after):
        return "a step does not end with updates alone"
    sizes = {v.name: prod(v.type.shape) for v in program.variables}
    size = sum(sizes[name] for update in updates for name in update.parameters)
    if size >= LARGE_UPDATE:
        return f"{size} weights, and from {LARGE_UPDATE} on PyTorch's own updates are as fast"
    for update in updates:
        if not isinstance(update.rule, RULES):
            return f"the rule {update.rule}"
        if update.rounding != "nearest" or update.loss_scale is not None:
            return "updates round at random, or are divided by a loss scale"
    if not _all_float(program, updates):
        return "not all weights and states are float32"
    if not _only_copies(_function(program)):
        return "the function writes a variable in another way than by one copy"
    return None


def _function(program: Program) -> Function:
    (call,) = program.calls
    return next(f for f in program.functions if f.name == call.function)


def _all_float(program: Program, updates: Sequence[Update]) -> bool:
    types = {variable.name: variable.type for variable in program.variables}
    names = [n for u in updates for n in (*u.parameters, *u.gradients)]
    names += [n for u in updates for _, states in u.states for n in states]
    return all(types[name].dtype == torch.float32 for name in names)


def _only_copies(function: Function) -> bool:
    """Whether all that a function writes in place it writes once, by a copy nobody reads."""
    copied: set[object] = set()
    for node in function.operators:
        if node.op != "call_function":
            return False
        if not writes(node):
            continue
        target = node.args[0]
        isinput = isinstance(target, fx.Node) and target.op == "placeholder"
        if node.target is not aten.copy_.default or node.users or not isinput or target in copied:
            return False
        copied.add(target)
    return True


def link(program: Program, zeros: Zeros) -> Linked:
    """The step as one function, for numbers of which `zeros` are left out; see `why_not_fused`."""
    return _Linker(program).link(zeros)


class _Linker:
    """Writes the graph of a whole step.

    Invariant: `values` has a node of `graph` for every variable and received value, the newest.
    """

    def __init__(self, program: Program) -> None:
        (self.call,) = program.calls
        self.program, self.function = program, _function(program)
        self.updates = [i for i in program.walk() if isinstance(i, Update)]
        self.gradient_of = {  # of parameters and of their states
            name: gradient
            for update in self.updates
            for names in (update.parameters, *(names for _, names in update.states))
            for name, gradient in zip(names, update.gradients, strict=True)
        }
        self.graph = fx.Graph()
        self.values: dict[str, fx.Node] = {}

    def link(self, zeros: Zeros) -> Linked:
        placeholders = self.function.graph.graph.find_nodes(op="placeholder")
        given = dict(zip(self.call.arguments, placeholders, strict=True))
        variables = {v.name: v for v in self.program.variables}
        written_here = {self.call.arguments[i] for i in self.function.written}
        accumulators = {g for u in self.updates for g in u.gradients}
        changed = {n for u in self.updates for n in (*u.parameters, *_states_of(u))}
        changed |= written_here - accumulators
        state = tuple(name for name in variables if name in changed)
        constants = tuple(n for n in given if n in variables and n not in changed | accumulators)
        received = tuple(name for name in given if name not in variables)
        for name in (*state, *constants, *received):
            self.values[name] = self.take(name, given, variables)
        numbers = tuple(
            dict.fromkeys(
                (update.group, name)
                for update in self.updates
                for name in update.rule.hyperparameters
                if (update.group, name) not in zeros
            )
        )
        of_numbers = {pair: self.number(*pair) for pair in numbers}
        old = dict(self.values)
        results, gradients = self.compute(given)
        for update in self.updates:
            self.update(update, gradients, old, of_numbers)
        sends = {i.stream: i.value for i in self.program.walk() if isinstance(i, Send)}
        sent = tuple(sends[output.name] for output in self.program.outputs)
        outputs = [self.own(self.values[name], old[name]) for name in state]
        self.graph.output((*outputs, *(results[name] for name in sent)))
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        function = make_function(f"whole_{self.function.name}", module)
        return Linked(function, state, constants, received, numbers, sent)

    def take(
        self, name: str, given: Mapping[str, fx.Node], variables: Mapping[str, Variable]
    ) -> fx.Node:
        """A placeholder; what only the update reads has the layout of a gradient's accumulator."""
        node = self.graph.placeholder(f"a{len(self.values)}")
        if name in given:
            node.meta["val"] = given[name].meta["val"]
            return node
        like: torch.Tensor = given[self.gradient_of[name]].meta["val"]
        scalar = not variables[name].type.shape
        node.meta["val"] = like.new_empty(()) if scalar else torch.empty_like(like)
        return node

    def number(self, group: int, name: str) -> fx.Node:
        node = self.graph.placeholder(f"{name}_of_group{group}")
        like = next(iter(self.values.values())).meta["val"]
        node.meta["val"] = like.new_empty((), dtype=torch.float64)
        return node

    def compute(self, given: Mapping[str, fx.Node]) -> tuple[dict[str, Any], dict[str, fx.Node]]:
        """Copy the operators; return results and gradients by name, and renew `values`."""
        names = {node: name for name, node in given.items()}
        copies = {node: self.values[name] for name, node in given.items() if name in self.values}
        gradients = {}
        for node in self.function.operators:
            if node.target is aten.copy_.default and node.args[0] in names:
                name, value = names[node.args[0]], copies[node.args[1]]  # type: ignore[index]
                if name in self.values:
                    self.values[name] = value
                else:
                    gradients[name] = value
                continue
            copies[node] = self.graph.node_copy(node, copies.__getitem__)
        (output,) = self.function.graph.graph.find_nodes(op="output")
        pairs = zip(self.call.results, output.args[0], strict=True)
        return {n: node and copies[node] for n, node in pairs if n}, gradients

    def update(
        self,
        update: Update,
        gradients: Mapping[str, fx.Node],
        old: Mapping[str, fx.Node],
        of_numbers: Mapping[tuple[int, str], fx.Node],
    ) -> None:
        numbers = {
            name: node for (group, name), node in of_numbers.items() if group == update.group
        }
        writer = Writer(self.graph)
        for place, (name, total) in enumerate(
            zip(update.parameters, update.gradients, strict=True)
        ):
            gradient = gradients[total]
            if update.divisor != 1:
                gradient = writer.call(aten.div.Tensor, gradient, update.divisor)
            names = {state: of[place] for state, of in update.states}
            states = {state: old[variable] for state, variable in names.items()}
            new, changed = written(update.rule, writer, old[name], gradient, states, numbers)
            self.values[name] = new
            self.values |= {names[state]: node for state, node in changed.items()}

    def own(self, new: fx.Node, old: fx.Node) -> fx.Node:
        """The result for a variable: memory of its own, described in the variable's layout."""
        if owner(new).op == "placeholder":
            new = Writer(self.graph).call(aten.clone.default, new)
        if new.meta["val"].stride() != old.meta["val"].stride():
            node = self.graph.call_function(aten.clone.default, (new,))
            node.meta["val"] = torch.empty_like(old.meta["val"])
            return node
        return new


def _states_of(update: Update) -> list[str]:
    return [name for _, names in update.states for name in names]
