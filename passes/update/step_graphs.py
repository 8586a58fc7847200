"""Query the graph of a step, and build those of its functions."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.capture.update.trace_step import HOST, UntraceableUpdate
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.graphs import OpOverload, schema_of
from ipu_dynamo.passes.graph.builder import call_on
from ipu_dynamo.passes.update_levels import UpdateGraphs, UpdateStep


def each_step(update: RecordedUpdate | UpdateGraphs, rewrite: Callable[[Any], bool]) -> bool:
    """Rewrite the graph of each step; `rewrite`, like this, says whether anything changed."""
    changed = [step for step in update.steps if rewrite(step)]
    for step in changed:
        step.graph.recompile()
    return bool(changed)


def depends_on(graph: fx.Graph, sources: Collection[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """The placeholders among `sources` that each node depends on."""
    own = frozenset(sources)
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        inputs: frozenset[fx.Node] = frozenset()
        for source in node.all_input_nodes:
            inputs |= found[source]
        found[node] = inputs | {node} if node in own else inputs
    return found


def numbers_without_tensors(step: UpdateStep) -> set[str]:
    """Paths of the numbers whose next values depend on no parameter, no gradient and no state."""
    leaves, after = step.leaves, step.after
    numbers = {x.path for x in step.recorded.taken if x.is_number or step.world.is_known(x)}
    while True:  # a number that depends on a removed one is removed, too
        sources = {leaves[path] for path in leaves.keys() - numbers}
        depends = depends_on(step.graph.graph, {*step.parameters, *step.gradients, *sources})
        wrong = {p for p in numbers if isinstance(n := after.get(p), fx.Node) and depends[n]}
        if not wrong:
            return numbers
        numbers -= wrong


def is_number(node: fx.Node) -> bool:
    """Whether it is a tensor without dimensions."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 0


def full_like(graph: fx.Graph, value: float, like: fx.Node) -> fx.Node:
    """Append a tensor of one value, of the shape and type of another."""
    return call_on(graph, aten.full_like.default, like, value)


def all_hold(graph: fx.Graph, conditions: Sequence[fx.Node], like: Tensor) -> fx.Node:
    """Append whether all of some b8[] hold."""
    if not conditions:
        node = graph.call_function(aten.ones.default, ([],), {"dtype": torch.bool})
        with fake_mode_of([like]):
            node.meta["val"] = torch.ones([], dtype=torch.bool)
        return node
    total, *others = conditions
    for other in others:
        total = call_on(graph, aten.logical_and.default, total, other)
    return total


def owned_results(graph: fx.Graph, results: Sequence[Any]) -> tuple[fx.Node, ...]:
    """Copy each result that shares memory with an argument or with another result.

    Raises:
        UntraceableUpdate: one is no tensor.
    """
    found: list[fx.Node] = []
    for node in results:
        if not isinstance(node, fx.Node):
            raise UntraceableUpdate(
                f"the optimizer puts {node!r} in the place of a state", hint=HOST
            )
        alone = node.op == "call_function" and not _is_view(node) and node not in found
        found.append(node if alone else call_on(graph, aten.clone.default, node))
    return tuple(found)


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and any(
        arg.alias_info is not None and not arg.alias_info.is_write
        for arg in schema_of(node.target).arguments
    )


def is_elementwise(node: fx.Node, shape: torch.Size) -> bool:
    """Whether each element of a result of this shape depends on one element of each argument."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    copies = node.target in (aten._to_copy.default, aten.clone.default, aten.full_like.default,
                             aten.zeros_like.default, aten.ones_like.default, aten.detach.default,
                             aten.alias.default, aten.empty_like.default)  # fmt: skip
    value = node.meta.get("val")
    return (pointwise or copies) and isinstance(value, Tensor) and value.shape == shape
