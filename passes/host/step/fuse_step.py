"""Fuse a small training step and its update into one pure function: variables in, new ones out.

Before   (%loss) = call @step0(%w, %x, !%w..grad);  update group 0 sgd (%w by %w..grad)
After    %w', %loss = whole_step0(%w, %x, %lr)
Keeps    values but for the order of roundings in the update. No accumulator is written, no operator
         of the update is launched, and until the call ends no variable changes.
Source   our own; the whole step under one `jit`, as in JAX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.accumulate import accumulate_matmul
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import owner, writes
from ipu_dynamo.passes.graph.builder import call_on
from ipu_dynamo.passes.host.step.fuse_updates import (
    UpdateWriter,
    factors_of,
    hyperparameters_of,
    read_by,
    takes_as_they_are,
    why_not_traced,
    written_by,
)
from ipu_dynamo.passes.host.step.fusing_costs import fusing_costs
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import (
    Call,
    Decision,
    Function,
    HostProgram,
    JointUpdate,
    Program,
    Receive,
    Send,
    Update,
    UpdatePart,
    Variable,
    make_function,
)
from ipu_dynamo.program.fused import Fused, Hyperparameters, Zeros, zeros_of
from ipu_dynamo.program.ir.update_rules import SGD, Adam, Traced
from ipu_dynamo.program.schedule.estimated_times import on_cpu
from ipu_dynamo.program.schedule.sections import sections

_RULES = (SGD, Adam, Traced)  # a step with another one keeps the bits of its kernel


def why_not_fused(program: Program) -> str | None:
    """What keeps a step and its update from being one function, in words; None: nothing does.

    It has to be one call, and an update of float32 numbers by known rules.
    """
    if program.kind != "training":
        return "nothing is trained"
    if program.replicas > 1:
        return f"{program.replicas} replicas"
    if program.num_ipus > 1:
        return f"{program.num_ipus} IPUs"
    cut = sections(program)
    calls = program.calls
    if len(calls) != 1 or cut.micro_batches != 1:
        return f"{cut.micro_batches} micro-batches a step, {len(calls)} calls each"
    factors = factors_of(cut.before)
    before = [i for i in cut.before if i is not factors]
    if before or not all(isinstance(i, Receive | Call | Send) for i in cut.loop):
        return "variables or values are off the chip"
    updates = [i for i in cut.after if isinstance(i, Update)]
    kinds = Update | UpdatePart | JointUpdate
    if not updates or not all(isinstance(i, kinds) for i in cut.after):
        return "a step does not end with updates alone"
    for update in updates:
        if not isinstance(update.rule, _RULES):
            return f"the rule {update.rule}"
        if update.rounding != "nearest" or update.loss_scale is not None:
            return "updates round at random, or are divided by a loss scale"
    if factors is not None and (reason := why_not_traced(program, factors)) is not None:
        return reason
    if not _types_fit(program, updates):
        return "not all weights and states are float32"
    if not _only_stores(_function(program)):
        return "the function writes a variable in another way than by one store"
    return None


def _function(program: Program) -> Function:
    (call,) = program.calls
    return next(f for f in program.functions if f.name == call.function)


def _types_fit(program: Program, updates: Sequence[Update]) -> bool:
    """Whether an update computes in the types that weights, gradients and states have."""
    types = {variable.name: variable.type for variable in program.variables}
    return all(takes_as_they_are(program, update, types) for update in updates)


def _only_stores(function: Function) -> bool:
    """Whether all that a function writes in place it writes once, by a store nobody reads."""
    stored: set[object] = set()
    for node in function.operators:
        if node.op != "call_function":
            return False
        if not writes(node):
            continue
        target = node.args[0]
        is_input = isinstance(target, fx.Node) and target.op == "placeholder"
        if not _stores(node) or node.users or not is_input or target in stored:
            return False
        stored.add(target)
    return True


def _stores(node: fx.Node) -> bool:
    """Whether an operator writes a whole value, that of a matrix product perhaps."""
    if node.target is accumulate_matmul:
        return node.args[1] is False
    return node.target is aten.copy_.default


def fuse(program: Program, zeros: Zeros) -> Fused:
    """The step as one function without the hyperparameters `zeros`; see `why_not_fused`."""
    return _Fusing(program).fuse(zeros)


class _Fusing:
    """Writes the graph of a whole step.

    Invariant: `values` has a node of `graph` for every variable and received value, the newest.
    """

    def __init__(self, program: Program) -> None:
        (self.call,) = program.calls
        self.program, self.function = program, _function(program)
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
        changed |= {*written_by(self.after, self.factors)}
        state = tuple(name for name in variables if name in changed)
        read = dict.fromkeys((*inputs, *read_by(self.after)))
        constants = tuple(n for n in read if n in variables and n not in changed | accumulators)
        received = tuple(name for name in inputs if name not in variables)
        for name in (*state, *constants, *received):
            self.values[name] = self.take(name, inputs, variables)
        hyperparameters = hyperparameters_of(self.program, self.updates, self.factors, zeros)
        of_hyperparameters = {
            pair: self.number(*pair, of.dtype) for pair, of in hyperparameters.items()
        }
        old = dict(self.values)
        results, gradients = self.compute(inputs)
        for update in self.updates:
            self.divide(update, gradients)
        writer = UpdateWriter(self.program, self.graph, old, gradients, of_hyperparameters)
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
        """A placeholder; what only the update reads has the layout of a gradient's accumulator."""
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
        """Let the gradients of an update be what its equations take."""
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
            if _stores(node) and node.args[0] in names:
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
        """What an operator stores."""
        if node.target is aten.copy_.default:
            return copies[node.args[1]]  # type: ignore[index]
        a, b = node.args[2:]
        product = call_on(self.graph, aten.mm.default, copies[a], copies[b])  # type: ignore[index]
        product.meta = node.meta | {"val": product.meta["val"]}
        return product

    def own(self, new: fx.Node, old: fx.Node) -> fx.Node:
        """The result for a variable: memory of its own, described in the variable's layout."""
        if owner(new).op == "placeholder":
            new = call_on(self.graph, aten.clone.default, new)
        if new.meta["val"].stride() != old.meta["val"].stride():
            node = self.graph.call_function(aten.clone.default, (new,))
            node.meta["val"] = torch.empty_like(old.meta["val"])
            return node
        return new


def _states_of(update: Update) -> list[str]:
    return [name for _, names in update.states for name in names]


class FuseStep(Pass):
    """The pass.

    Args:
        compiles: functions are compiled, and not run operator by operator.
        hyperparameters: hyperparameters that the function is made for.
        forced: whether to, whatever it is worth.
    """

    level = "host"
    choices = (True, False)

    compiles: bool = True
    hyperparameters: Hyperparameters = ()
    forced: bool | None = None

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
        rules = {i.group: i.rule for i in program.walk() if isinstance(i, Update)}
        return replace(host, fused=fuse(program, zeros_of(rules, self.hyperparameters)))
