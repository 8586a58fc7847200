"""Define the levels of an optimiser's step, from its record to the functions of a program."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ipu_dynamo.capture.update.trace_step import RecordedStep
from ipu_dynamo.capture.update.world import Leaf, World
from ipu_dynamo.program import graph_outputs
from ipu_dynamo.program.ir.traced_update import Counter, TracedStep
from ipu_dynamo.program.ir.types import TensorType

JOINT = -1  # in the place of a parameter


@dataclass(frozen=True, slots=True)
class UpdatePlace:
    """Where a value of an update is computed.

    Args:
        owner: index of the parameter; `JOINT`: several together.
        round: of a parameter's value, the number of rounds before it; else its own round.
    """

    owner: int
    round: int


@dataclass
class UpdateStep:
    """One step of an optimiser as a graph of tensors.

    Args:
        recorded: the step it was made from. Both have the same placeholders.
        graph: it returns the new values of parameters, in float32 for halves, those of the leaves
            that change, and a b8[] for each condition.
        places: where each value is computed that depends on a parameter, a gradient or a state.
    """

    recorded: RecordedStep
    graph: fx.GraphModule
    places: dict[fx.Node, UpdatePlace] = field(default_factory=dict)

    @property
    def world(self) -> World:
        """The optimiser's leaves before the step."""
        return self.recorded.world

    @property
    def parameters(self) -> list[fx.Node]:
        """The placeholders of the parameters."""
        return list(self.graph.graph.find_nodes(op="placeholder"))[: len(self.world.parameters)]

    @property
    def gradients(self) -> list[fx.Node]:
        """The placeholders of the gradients."""
        count = len(self.world.parameters)
        return list(self.graph.graph.find_nodes(op="placeholder"))[count : 2 * count]

    @property
    def leaves(self) -> dict[str, fx.Node]:
        """The other placeholders, by path."""
        rest = list(self.graph.graph.find_nodes(op="placeholder"))[2 * len(self.world.parameters) :]
        return {leaf.path: node for leaf, node in zip(self.recorded.taken, rest, strict=True)}

    @property
    def inputs(self) -> dict[str, Leaf]:
        """The leaves that are inputs, by path."""
        return {leaf.path: leaf for leaf in self.recorded.taken}

    @property
    def weights(self) -> list[fx.Node]:
        """The new values of the parameters."""
        return list(graph_outputs(self.graph)[: len(self.world.parameters)])

    @property
    def after(self) -> dict[str, Any]:
        """The next values of the leaves, by path: nodes, or constants."""
        nodes = iter(graph_outputs(self.graph))
        found = {
            result.path: next(nodes) if result.in_graph else result.constant
            for result in self.recorded.results
        }
        for index in range(len(self.world.parameters)):
            del found[f"parameter {index}"]
        return found

    @property
    def conditions(self) -> list[tuple[fx.Node, str]]:
        """The conditions of the trace: b8[] nodes, each with its line of the optimiser."""
        kept = self.recorded.kept_conditions
        nodes = graph_outputs(self.graph)
        return [
            (node, line)
            for node, (_, line) in zip(nodes[len(nodes) - len(kept) :], kept, strict=True)
        ]


@dataclass(frozen=True)
class PlannedState:
    """A tensor that an optimiser keeps, and that depends on gradients.

    Args:
        path: of its leaf.
        key: its name, unique for its parameter, or for all states without a parameter.
    """

    path: str
    key: str
    type: TensorType


@dataclass(frozen=True)
class UpdatePlan:
    """The common plan of all steps of an optimiser.

    Args:
        states: of each parameter.
        shared: states that belong to no parameter.
        counters: paths of the numbers that steps change and that depend on no gradient, and the
            counters for them.
        epochs: number of steps before the last one.
        hyperparameters: paths of the numbers that no step changes, only the user.
    """

    states: tuple[tuple[PlannedState, ...], ...]
    shared: tuple[PlannedState, ...]
    counters: Mapping[str, Counter]
    epochs: int
    hyperparameters: tuple[str, ...]

    @property
    def owners(self) -> dict[str, tuple[int, str]]:
        """By path of a parameter's state, the parameter and the key."""
        return {s.path: (place, s.key) for place, of in enumerate(self.states) for s in of}

    @property
    def shared_names(self) -> dict[str, str]:
        """By path of a state of no parameter, its variable."""
        return {state.path: state.key for state in self.shared}


@dataclass
class UpdateGraphs:
    """The steps of an optimiser as graphs of tensors, and their common plan.

    Args:
        worlds, stands: as a `RecordedUpdate` has them.
        plan: of the parameters that are traced; None before `PlanUpdate`.
    """

    worlds: tuple[World, ...]
    stands: tuple[int, ...]
    steps: tuple[UpdateStep, ...]
    plan: UpdatePlan | None = None


@dataclass(frozen=True)
class UpdateFunctions:
    """The steps of an optimiser as functions that programs call.

    Args:
        worlds: the optimiser's leaves before each step.
        plan: of the parameters that `steps` have.
        traced: the world of these parameters, before the last step.
        stands: for each parameter of `worlds`, the index of the parameter that was traced for it.
    """

    worlds: tuple[World, ...]
    plan: UpdatePlan
    steps: tuple[TracedStep, ...]
    traced: World = field(repr=False)
    stands: tuple[int, ...]

    @property
    def first(self) -> World:
        """The optimiser's leaves now."""
        return self.worlds[0]
