"""Cut a lowered step into a function of numbers alone, and functions for parameters.

Before   one graph of all parameters, gradients, states and numbers
After    @factors(lr, beta, step) -> (factors, next step, whether the trace holds);
         @piece(weight, gradient, states, factors) -> (weight, states), once for equal parameters;
         where parameters hang on each other, before that in rounds
         @part(weight, gradient, states, factors) -> (norm), and @joint(norms) -> (factor)
Keeps    what every result is.
Source   a program's update: one function for all parameters of a shape, and numbers beside.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.capture.update.trace_step import HOST, UntraceableUpdate
from ipu_dynamo.ops.graph_queries import may_draw, needed_for
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update.assign_owners import owners_of
from ipu_dynamo.passes.update.cut_factors import Factors, counters_of
from ipu_dynamo.passes.update.step_graphs import (
    is_elementwise,
    is_number,
    owned_results,
)
from ipu_dynamo.passes.update_levels import (
    JOINT,
    UpdateFunctions,
    UpdateGraphs,
    UpdatePlace,
    UpdatePlan,
    UpdateStep,
)
from ipu_dynamo.program.ir.function import Function, make_function
from ipu_dynamo.program.ir.made_names import alone
from ipu_dynamo.program.ir.traced_update import ParameterPart, Round, TracedStep
from ipu_dynamo.program.ir.types import TensorType

Inputs = Sequence[tuple[str, fx.Node | TensorType]]  # names, and their nodes in the step


def _cut(step: UpdateStep, common: UpdatePlan, epoch: int) -> TracedStep:
    """The functions of a step.

    Args:
        epoch: which of the variants it is.

    Raises:
        UntraceableUpdate: it cannot be cut.
    """
    planned = common.owners.keys() | common.shared_names.keys() | common.counters.keys()
    after = step.after
    written = (path for path, leaf in step.leaves.items() if after.get(path, leaf) is not leaf)
    if path := next((path for path in written if path not in planned), None):
        raise UntraceableUpdate(
            f"some steps of the optimizer change {path}, and others do not", hint=HOST
        )
    return _Cutter(step, common, epoch).cut()


class _Cutter:
    """Cuts one step. `names` has the values that one function makes and others take."""

    def __init__(self, step: UpdateStep, common: UpdatePlan, epoch: int) -> None:
        self.step, self.common, self.epoch = step, common, epoch
        self.world = step.world
        self.name = type(self.world.optimizer).__name__.lower()
        self.parameters, self.gradients = step.parameters, step.gradients
        self.leaves, self.after = step.leaves, step.after
        self.shared = {self.leaves[s.path]: s.key for s in common.shared if s.path in self.leaves}
        self.owners, self.place = owners_of(step, common), step.places
        self.order = {node: i for i, node in enumerate(step.graph.graph.nodes)}
        self.factors: dict[fx.Node, str] = {}
        self.names: dict[fx.Node, str] = {}
        self.functions: dict[str, Function] = {}
        self.drawn: set[fx.Node] = set()

    def cut(self) -> TracedStep:
        step, common = self.step, self.common
        results = [
            [weight, *(self.after.get(state.path) for state in states)]
            for weight, states in zip(step.weights, common.states, strict=True)
        ]
        rounds = self.rounds([node for of in results for node in of])
        functions, arguments, elementwise = {}, {}, set()
        for number, name in enumerate(self.world.names):
            function, taken, inside = self.of_parameter(number, results[number])
            functions[name] = function
            arguments[name] = tuple(self.known_as(node) for node in taken)
            if self.is_elementwise(number, taken, inside):
                elementwise.add(function)
        factors = Factors(step, common, self.epoch, self.name, self.owners)
        states = {
            name: tuple((state.key, state.type) for state in of)
            for name, of in zip(self.world.names, common.states, strict=True)
        }
        return TracedStep(
            factors.function(self.factors),
            tuple(pair for pair, _ in factors.hyperparameters),
            counters_of(step, common),
            tuple(self.factors.values()),
            self.functions,
            functions,
            states,
            arguments,
            frozenset(elementwise),
            once=self.epoch < common.epochs,
            rounds=rounds,
            shared=tuple((state.key, state.type) for state in common.shared),
        )

    def rounds(self, results: Sequence[Any]) -> tuple[Round, ...]:
        """Make the rounds, in which parameters read values of each other."""
        after = [self.after.get(state.path) for state in self.common.shared]
        results = [node for node in results if isinstance(node, fx.Node)]
        nodes = [node for node in after if isinstance(node, fx.Node)]
        wanted = needed_for([*results, *nodes])
        between = _values_between(self.step.graph.graph, self.place, wanted, nodes)
        read = {*results, *(s for node in wanted for s in self.read_elsewhere(node))}
        rounds = []
        for number, values in enumerate(between):
            parts: dict[str, ParameterPart] = {}
            made: dict[fx.Node, str] = {}
            for owner, name in enumerate(self.world.names):
                own = [node for node in values if self.place[node].owner == owner]
                if not own:
                    continue
                function, taken, _ = self.of_parameter(owner, own)
                first = len(self.names) + len(made)
                called = {node: alone(f"update.part{first + i}") for i, node in enumerate(own)}
                made |= called
                takes = tuple(map(self.known_as, taken))
                parts[name] = ParameterPart(function, takes, tuple(called.values()))
            self.names |= made
            written = [
                (value, state.key)
                for value, state in zip(after, self.common.shared, strict=True)
                if self.round_of(value) == number
            ]
            rounds.append(self.joint(number, parts, read, written))
        return tuple(rounds)

    def read_elsewhere(self, node: fx.Node) -> list[fx.Node]:
        """The joint values that a node reads from other functions."""
        if node not in self.place:
            return []
        own, taken = self.place[node], [s for s in node.all_input_nodes if s in self.place]
        joint = [source for source in taken if self.place[source].owner == JOINT]
        if own.owner != JOINT:
            return joint
        return [s for s in joint if self.place[s].round < own.round and s not in self.shared]

    def round_of(self, value: Any) -> int:
        """The round that computes the next value of a state of no parameter."""
        return self.place[value].round if value in self.place else 0

    def joint(
        self,
        number: int,
        parts: Mapping[str, ParameterPart],
        read: Collection[fx.Node],
        written: Sequence[tuple[Any, str]],
    ) -> Round:
        """Make the function of a round, which takes values of several parameters."""
        results = sorted(
            (n for n in read if n in self.place
             and self.place[n].owner == JOINT and self.place[n].round == number),
            key=self.order.__getitem__,
        )  # fmt: skip
        ends = [*results, *(value for value, _ in written)]
        inside, taken = self.slice(ends, {*self.names, *self.shared})
        inputs = [(f"value{i}", node) for i, node in enumerate(taken)]
        function = self.make(inputs, inside, ends)
        arguments = tuple(self.shared.get(node) or self.known_as(node) for node in taken)
        named = {
            node: alone(f"update.joint{len(self.names) + i}") for i, node in enumerate(results)
        }
        self.names |= named
        states = tuple(name for _, name in written)
        return Round(parts, function, arguments, tuple(named.values()), states)

    def of_parameter(
        self, number: int, results: Sequence[Any]
    ) -> tuple[str, list[fx.Node], list[fx.Node]]:
        """Make a function of one parameter; return its name, its arguments except weight, gradient
        and states, and its operators."""
        states = self.common.states[number]
        own: list[tuple[str, fx.Node | TensorType]] = [
            ("weight", self.parameters[number]),
            ("gradient", self.gradients[number]),
            *((f"state{i}", self.leaves.get(s.path) or s.type) for i, s in enumerate(states)),
        ]
        fixed = {node for _, node in own if isinstance(node, fx.Node)}
        inside, taken = self.slice(results, self.names, fixed)
        numbers = [(f"factor{i}", node) for i, node in enumerate(taken)]
        return self.make([*own, *numbers], inside, results), taken, inside

    def slice(
        self,
        results: Sequence[Any],
        stops: Collection[fx.Node],
        fixed: Collection[fx.Node] = (),
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """The operators that compute results, in order, and their other arguments.

        Args:
            stops: values of other functions.
            fixed: arguments that the function has in any case.
        """

        def is_taken(node: fx.Node) -> bool:
            return node in stops or (node not in self.place and is_number(node))

        def is_inside(node: fx.Node) -> bool:
            return not (is_taken(node) or node in fixed)

        wanted = [node for node in results if isinstance(node, fx.Node)]
        inside = filter(is_inside, needed_for(wanted, is_inside))
        ordered = sorted(inside, key=self.order.__getitem__)
        taken = [n for node in ordered for n in node.all_input_nodes if is_taken(n)]
        taken += filter(is_taken, wanted)
        return ordered, [node for node in dict.fromkeys(taken) if node not in fixed]

    def make(self, inputs: Inputs, inside: Sequence[fx.Node], results: Sequence[Any]) -> str:
        """Make a function, unless there is an equal one; its name.

        Raises:
            UntraceableUpdate: random numbers are drawn that another function needs, too.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        like = self.parameters[0].meta["val"]
        for name, node in inputs:
            placeholder = graph.placeholder(name)
            if isinstance(node, TensorType):  # a state that does not exist yet
                with fake_mode_of([like]):
                    placeholder.meta["val"] = torch.empty(node.shape, dtype=node.dtype)
                continue
            placeholder.meta["val"] = node.meta["val"]
            copies[node] = placeholder
        for node in inside:
            if may_draw(node):
                if node in self.drawn:
                    raise UntraceableUpdate(
                        f"the optimizer draws {node.target} for one parameter, and updates others "
                        "by it, too",
                        hint=HOST,
                    )
                self.drawn.add(node)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        made = [copies[node] if isinstance(node, fx.Node) else node for node in results]
        graph.output(owned_results(graph, made))
        function = make_function("piece", fx.GraphModule(torch.nn.Module(), graph))
        name = f"{self.name}_{function.key[:8]}"
        if name not in self.functions:
            self.functions[name] = make_function(name, function.graph)
        return name

    def known_as(self, node: fx.Node) -> str:
        """The name of an argument in instructions."""
        if node in self.names:
            return self.names[node]
        return self.factors.setdefault(node, alone(f"update.factor{len(self.factors)}"))

    def is_elementwise(
        self, number: int, taken: Sequence[fx.Node], inside: Sequence[fx.Node]
    ) -> bool:
        """Whether a function computes element by element."""
        shape = self.parameters[number].meta["val"].shape
        operators = [node for node in inside if node.op == "call_function"]
        return (
            all(is_elementwise(node, shape) for node in operators)
            and all(map(is_number, taken))
            and all(state.type.shape == tuple(shape) for state in self.common.states[number])
        )


def _values_between(
    graph: fx.Graph,
    place: Mapping[fx.Node, UpdatePlace],
    wanted: Collection[fx.Node],
    joint_results: Sequence[fx.Node],
) -> list[list[fx.Node]]:
    """For each round, the parameters' values that it is the first to read, in order.

    Args:
        wanted: nodes that are needed at all.
        joint_results: values that a round needs in any case.
    """
    first: dict[fx.Node, int] = {}

    def take(node: fx.Node, by: int) -> None:
        if node in place and place[node].owner != JOINT:
            first[node] = min(first.get(node, by), by)

    for node in graph.nodes:
        if node in wanted and node in place and place[node].owner == JOINT:
            for source in node.all_input_nodes:
                take(source, place[node].round)
    for node in joint_results:
        if node in place:
            take(node, place[node].round)
    rounds = [p.round for n, p in place.items() if n in wanted and p.owner == JOINT
              and n.op != "placeholder"]  # fmt: skip
    rounds += [place[n].round for n in joint_results if n in place]
    count = 1 + max(rounds) if rounds else 0
    order = {node: i for i, node in enumerate(graph.nodes)}
    return [
        sorted((n for n, at in first.items() if at == number), key=order.__getitem__)
        for number in range(count)
    ]


class CutUpdate(Pass):
    """The pass."""

    level = "update"
    needed = "programs call functions"

    def __call__(self, update: UpdateGraphs) -> UpdateFunctions:
        plan = update.plan
        assert plan is not None, "PlanUpdate comes before"
        first = plan.epochs + 1 - len(update.steps)
        steps = tuple(_cut(step, plan, first + i) for i, step in enumerate(update.steps))
        traced = update.steps[-1].world
        return UpdateFunctions(update.worlds, plan, steps, traced, update.stands)
