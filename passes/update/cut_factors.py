"""Make the function of a step that computes all values of hyperparameters and counters alone.

It also checks that the optimiser's Python would decide by its numbers as it did in the trace.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.capture.update.trace_step import HOST, UntraceableUpdate
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import needed_for
from ipu_dynamo.passes.graph.builder import call_on
from ipu_dynamo.passes.update.step_graphs import (
    all_hold,
    depends_on,
    full_like,
    owned_results,
)
from ipu_dynamo.passes.update_levels import UpdatePlan, UpdateStep
from ipu_dynamo.program.ir.function import Function, make_function
from ipu_dynamo.program.ir.made_names import alone
from ipu_dynamo.program.ir.traced_update import Counter
from ipu_dynamo.program.ir.types import TensorType

WARM_UP = alone("update.epoch")  # how many steps have changed the optimiser's kinds of states


def _input(graph: fx.Graph, name: str) -> fx.Node:
    """Append a placeholder. A state and a number of a group may have one name."""
    name = name.replace(".", "_").strip("_")
    taken = {node.target for node in graph.find_nodes(op="placeholder")}
    while name in taken:
        name += "_state"
    return graph.placeholder(name)


def counters_of(step: UpdateStep, common: UpdatePlan) -> tuple[Counter, ...]:
    """The counters of a step, in order."""
    counters = list(_distinct(step, common).values())
    if common.epochs:
        counters.append(Counter(WARM_UP, TensorType(torch.int64, ()), 0))
    return tuple(counters)


def _distinct(step: UpdateStep, common: UpdatePlan) -> dict[str, Counter]:
    """The counters, each under the first path of those that share it.

    Raises:
        UntraceableUpdate: this variant counts differently for parameters that share one.
    """
    known: dict[str, tuple[str, Counter]] = {}
    following = step.after
    for path, counter in common.counters.items():
        first, _ = known.setdefault(counter.name, (path, counter))
        if following.get(path) != following.get(first):
            raise UntraceableUpdate(
                f"{path} and {first} of the optimizer count alike, but not at the first step",
                hint=HOST,
            )
    return dict(known.values())


class Factors:
    """Makes the function of numbers.

    Args:
        epoch: which of the variants the step is.
        name: of the optimiser.
        owners: placeholders of tensors. Numbers do not depend on them.
    """

    def __init__(
        self,
        step: UpdateStep,
        common: UpdatePlan,
        epoch: int,
        name: str,
        owners: Mapping[fx.Node, int],
    ) -> None:
        self.step, self.common, self.epoch, self.name = step, common, epoch, name
        self.leaves, self.depends = step.leaves, depends_on(step.graph.graph, owners)

    @property
    def hyperparameters(self) -> list[tuple[tuple[int, str], fx.Node]]:
        """Numbers that a step only reads: their group and name, and their placeholder."""
        return [
            (leaf.hyperparameter, self.leaves[path])
            for path, leaf in self.step.inputs.items()
            if path in self.common.hyperparameters
        ]

    def function(self, crossing: Mapping[fx.Node, str]) -> Function:
        """The function.

        Args:
            crossing: the values that updates read.
        """
        step, graph, copies = self.step, fx.Graph(), dict[fx.Node, fx.Node]()
        like = step.parameters[0].meta["val"]
        for (group, name), node in self.hyperparameters:
            placeholder = _input(graph, f"group{group}_{name}")
            placeholder.meta["val"] = node.meta["val"]
            copies[node] = placeholder
        counters = []
        distinct = _distinct(step, self.common)
        for path, counter in distinct.items():
            placeholder = _input(graph, counter.name)
            with fake_mode_of([like]):
                placeholder.meta["val"] = torch.empty((), dtype=counter.type.dtype)
            counters.append(placeholder)
            if path in self.leaves:
                copies[self.leaves[path]] = placeholder
        epoch = None
        if self.common.epochs:
            epoch = _input(graph, WARM_UP)
            with fake_mode_of([like]):
                epoch.meta["val"] = torch.empty((), dtype=torch.int64)
        following = step.after
        after = [following.get(path) for path in distinct]
        conditions = [node for node, _ in self._conditions()]
        wanted = [*crossing, *(n for n in after if isinstance(n, fx.Node)), *conditions]
        needed = needed_for(wanted)
        for node in step.graph.graph.nodes:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        results: list[fx.Node] = [copies[node] for node in crossing]
        for value, placeholder in zip(after, counters, strict=True):
            results.append(_next_counter(graph, value, placeholder, copies))
        holds: Sequence[fx.Node] = [copies[node] for node in conditions]
        if epoch is not None:
            last = self.common.epochs
            results.append(full_like(graph, min(self.epoch + 1, last), epoch))
            compare = aten.ge.Scalar if self.epoch == last else aten.eq.Scalar
            holds = [*holds, call_on(graph, compare, epoch, self.epoch)]
        results.append(all_hold(graph, holds, like))
        graph.output(owned_results(graph, results))
        function = make_function("factors", fx.GraphModule(torch.nn.Module(), graph))
        return make_function(f"{self.name}_factors_{function.key[:8]}", function.graph)

    def _conditions(self) -> list[tuple[fx.Node, str]]:
        """The conditions on numbers. Other conditions are ranges of unknown values, by which Python
        decided nothing."""
        world = self.step.world
        known = {
            self.leaves[path]
            for path, leaf in self.step.inputs.items()
            if (world.is_known(leaf) or leaf.is_number) and path not in self.common.counters
        }
        kept = []
        for node, line in self.step.conditions:
            if not self.depends[node]:
                kept.append((node, line))
            elif self.depends[node] & known:
                raise UntraceableUpdate(
                    "the optimizer decides in Python by a value that hangs on gradients",
                    where=line,
                    hint=HOST,
                )
        return kept


def _next_counter(
    graph: fx.Graph, value: Any, counter: fx.Node, copies: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    if isinstance(value, fx.Node):
        following = copies[value]
        if following.meta["val"].dtype != counter.meta["val"].dtype:
            dtype = counter.meta["val"].dtype
            following = call_on(graph, aten._to_copy.default, following, dtype=dtype)
        return following
    if value is None:  # it is not there yet
        return counter
    return full_like(graph, value, counter)
