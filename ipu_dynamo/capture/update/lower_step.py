"""Lower a traced step to a graph of tensors, and say what each of its values hangs on."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.tracing import fake_mode, fake_mode_of, to_fake
from ipu_dynamo.capture.private.update_symbols import as_tensor, free_symbols, record
from ipu_dynamo.capture.update.number_tensors import Number, NumbersAsTensors, is_half, upcast
from ipu_dynamo.capture.update.trace_step import (
    HOST,
    TracedGraph,
    UntraceableUpdate,
    explained,
)
from ipu_dynamo.capture.update.world import Leaf, World

aten = torch.ops.aten


@dataclass(frozen=True)
class Lowered:
    """A step as a graph of tensors.

    Args:
        parameters, gradients: placeholders.
        leaves: placeholders, by path.
        weights: new values of the parameters; of halves in float32.
        after: what the leaves become, by path: nodes, or constants.
        conditions: b8[] nodes, with the lines behind them.
    """

    traced: TracedGraph
    graph: fx.Graph
    module: fx.GraphModule
    parameters: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]
    leaves: Mapping[str, fx.Node]
    weights: tuple[fx.Node, ...]
    after: Mapping[str, Any]
    conditions: tuple[tuple[fx.Node, str], ...]

    @property
    def inputs(self) -> dict[str, Leaf]:
        """The leaves that are inputs, by path."""
        return {leaf.path: leaf for leaf in self.traced.taken}


def lower(traced: TracedGraph) -> Lowered:
    """Lower a traced step.

    Raises:
        UntraceableUpdate: a condition cannot be kept.
        UnknownNumberUse: a number is used in a way that is not known.
    """
    mode, world = fake_mode(), traced.world
    count = len(world.parameters)
    (output,) = traced.graph.graph.find_nodes(op="output")
    recorded = [node.meta["val"] for node in output.args[0]]
    parameters = [to_fake(mode, p.detach()) for p in world.parameters]
    with mode:
        gradients = [upcast(p).clone() for p in parameters]
        leaves = [_input(leaf, mode) for leaf in traced.taken]

    tensors = [*world.parameters, *(leaf.value for leaf in traced.taken if leaf.is_tensor)]
    halves = any(map(is_half, tensors))

    def run(*values: Tensor) -> list[Tensor]:
        numbers = values[2 * count :]
        given: list[Any] = [upcast(value) for value in values[: 2 * count]]
        for leaf, value in zip(traced.taken, numbers, strict=True):
            given.append(Number(value) if leaf.is_number else upcast(value))
        interpreter = NumbersAsTensors(traced.graph, halves=halves)
        results = interpreter.run(*given)
        made = [
            _result(value, like, weight=place < count)
            for place, (value, like) in enumerate(zip(results, recorded, strict=True))
        ]
        return [*made, *_conditions(traced, given, interpreter.items)]

    with torch.no_grad(), mode:
        try:
            module = record(run, [*parameters, *gradients, *leaves])
        except Exception as error:
            raise explained(error, world) from error
    graph = module.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    by_path = {x.path: p for x, p in zip(traced.taken, placeholders[2 * count :], strict=True)}
    free = _free_of_tensors(traced, graph, by_path)
    for paths in alike_counters(world):
        first, *others = [path for path in paths if path in free] or paths[:1]
        for path in others:
            by_path[path].replace_all_uses_with(by_path[first])
    _write_constants(module)
    _drop_copies(graph)
    join_equal(graph)
    (output,) = graph.find_nodes(op="output")
    values = list(output.args[0])
    nodes = iter(values)
    after: dict[str, Any] = {}
    for result in traced.results:
        after[result.path] = next(nodes) if result.node is not None else result.constant
    weights = tuple(after.pop(f"parameter {i}") for i in range(count))
    kept = _kept(traced)
    return Lowered(
        traced,
        graph,
        module,
        tuple(placeholders[:count]),
        tuple(placeholders[count : 2 * count]),
        by_path,
        weights,
        after,
        tuple((node, line) for node, (_, line) in zip(nodes, kept, strict=True)),
    )


def _free_of_tensors(
    traced: TracedGraph, graph: fx.Graph, leaves: Mapping[str, fx.Node]
) -> set[str]:
    """Paths of numbers whose next values hang on no parameter, no gradient and no other state."""
    world = traced.world
    free = {leaf.path for leaf in traced.taken if leaf.is_number or world.is_known(leaf)}
    (output,) = graph.find_nodes(op="output")
    nodes = iter(output.args[0])
    after = {result.path: next(nodes) for result in traced.results if result.node is not None}
    tensors = list(graph.find_nodes(op="placeholder"))[: 2 * len(world.parameters)]
    while True:
        sources = {*tensors, *(leaves[path] for path in leaves.keys() - free)}
        hangs = depends_on(graph, sources)
        wrong = {path for path in free if path in after and hangs[after[path]]}
        if not wrong:
            return free
        free -= wrong


def _input(leaf: Leaf, mode: Any) -> Tensor:
    if leaf.is_number:
        dtype = torch.float64 if type(leaf.value) is float else torch.int64
        return torch.empty((), dtype=dtype)
    fake: Tensor = to_fake(mode, leaf.value.detach())
    return fake


def _result(value: Any, like: Any, *, weight: bool) -> Tensor:
    if isinstance(value, Number):
        return value.tensor
    assert isinstance(value, Tensor)
    return value if weight else value.to(like.dtype)


def _kept(traced: TracedGraph) -> list[tuple[Any, str]]:
    """The conditions of which every symbol is known."""
    return [
        (expression, line)
        for expression, line in traced.conditions
        if free_symbols(expression) and free_symbols(expression) <= traced.symbols.keys()
    ]


def _conditions(traced: TracedGraph, given: Sequence[Any], items: Sequence[Tensor]) -> list[Tensor]:
    values = {
        symbol: given[place].tensor if place >= 0 else items[-1 - place]
        for symbol, place in traced.symbols.items()
        if place < 0 or isinstance(given[place], Number)
    }
    made = []
    for expression, line in _kept(traced):
        try:
            made.append(as_tensor(expression, values).to(torch.bool))
        except Exception as error:
            problem = f"the optimizer decides by {expression}, which no program can keep"
            raise UntraceableUpdate(problem, where=line, hint=HOST) from error
    return made


def _write_constants(module: fx.GraphModule) -> None:
    """Write tensors that the step makes of one number as operators: functions hold no tensors.

    Raises:
        UntraceableUpdate: there is another one.
    """
    graph = module.graph
    for node in list(graph.find_nodes(op="get_attr")):
        tensor = getattr(module, str(node.target)).detach()
        if not tensor.numel() or not bool((tensor == tensor.flatten()[0]).all()):
            raise UntraceableUpdate(
                f"the optimizer makes a tensor of the values {tensor.tolist()} in its step",
                hint=f"keep it in optimizer.state, or: {HOST}",
            )
        with graph.inserting_before(node):
            value = tensor.flatten()[0].item()
            full = graph.call_function(
                torch.ops.aten.full.default, (list(tensor.shape), value), {"dtype": tensor.dtype}
            )
        full.meta = dict(node.meta)
        if "val" not in full.meta:
            with fake_mode_of([next(iter(graph.nodes)).meta["val"]]):
                full.meta["val"] = torch.empty(tensor.shape, dtype=tensor.dtype)
        node.replace_all_uses_with(full)
        graph.erase_node(node)


def _drop_copies(graph: fx.Graph) -> None:
    """Let the value of a copy be that of what is copied: nothing in the graph is written."""
    for node in list(graph.nodes):
        if node.target is aten.copy.default:
            source = node.args[1]
        elif node.target is aten.clone.default and not node.kwargs:
            source = node.args[0]
        else:
            continue
        before, after = source.meta["val"], node.meta["val"]
        if before.dtype == after.dtype and before.shape == after.shape:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def alike_counters(world: World) -> list[list[str]]:
    """Paths of what counts the steps of parameters that step together, with equal counts."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for leaf in world.leaves:
        if leaf.parameter is None or not (leaf.is_number or world.is_known(leaf)):
            continue
        value = leaf.value.item() if leaf.is_tensor else leaf.value
        dtype = leaf.value.dtype if leaf.is_tensor else type(leaf.value)
        found.setdefault((leaf.group, leaf.key, dtype, value), []).append(leaf.path)
    return list(found.values())


def join_equal(graph: fx.Graph) -> None:
    """Let equal operators be one, but those that draw random numbers."""
    known: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        text = f"{node.target} {node.args} {node.kwargs}"
        if known.setdefault(text, node) is not node:
            node.replace_all_uses_with(known[text])
            graph.erase_node(node)


def depends_on(graph: fx.Graph, sources: Collection[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For every node, which of some placeholders it hangs on."""
    own = frozenset(sources)
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        inputs: frozenset[fx.Node] = frozenset()
        for source in node.all_input_nodes:
            inputs |= found[source]
        found[node] = inputs | {node} if node in own else inputs
    return found
