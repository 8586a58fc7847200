"""Cut a function at operators that loop by themselves, which no compiler needs to see.

What lies between them is compiled. A compiler that wants a functional graph would copy the memory
that such an operator writes in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops import serialized_loss
from ipu_dynamo.program import graph_outputs

Stage = Callable[[list[Tensor]], Sequence[Tensor | None]]
LOOPS = frozenset(
    {
        serialized_loss.serialized_loss,
        serialized_loss.serialized_loss_backward,
        serialized_loss.serialized_loss_backward_,
        serialized_loss.serialized_loss_step_,
    }
)


@dataclass(frozen=True, slots=True)
class Segment:
    """Operators that run together.

    Args:
        loop: they are a loop and what picks its results; otherwise they are to be compiled.
        inputs, outputs: nodes of the whole graph.
        graph: the operators; takes `inputs`, returns a tuple of `outputs`.
    """

    loop: bool
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    graph: fx.GraphModule


def has_loop(graph: fx.Graph) -> bool:
    """Whether a graph is to be cut."""
    return any(node.target in LOOPS for node in graph.nodes)


def cut(graph: fx.Graph) -> tuple[Segment, ...]:
    """The segments in the order in which they run, which is the graph's."""
    groups: list[list[fx.Node]] = [[]]
    own: dict[fx.Node, list[fx.Node]] = {}  # the group of each loop
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target in LOOPS:
            own[node] = [node]
            groups += [own[node], []]
        elif node.target is getitem and node.args[0] in own:
            own[node.args[0]].append(node)
        else:
            groups[-1].append(node)
    return tuple(_segment(group) for group in groups if group)


def _segment(nodes: Sequence[fx.Node]) -> Segment:
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))
    outputs = tuple(
        n
        for n in nodes
        if n.target not in LOOPS or isinstance(n.meta["val"], Tensor)
        if any(user not in inside for user in n.users)
    )
    graph, copies = fx.Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in outputs))
    loop = nodes[0].target in LOOPS
    return Segment(loop, inputs, outputs, fx.GraphModule(torch.nn.Module(), graph))


def run_in_segments(graph: fx.GraphModule, compile_: Callable[[fx.GraphModule], Stage]) -> Stage:
    """A callable on the graph's inputs; `compile_` makes those of what lies between the loops."""
    segments = cut(graph.graph)
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    results = graph_outputs(graph)
    slots = {node: slot for slot, node in enumerate(placeholders)}
    last: dict[fx.Node, int] = {}
    for index, segment in enumerate(segments):
        for node in segment.outputs:
            slots[node] = len(slots)
        last |= dict.fromkeys((*segment.inputs, *segment.outputs), index)
    steps = []
    for index, segment in enumerate(segments):
        run = _call(segment.graph) if segment.loop else compile_(segment.graph)
        given = [slots[node] for node in segment.inputs]
        made = [slots[node] for node in segment.outputs]
        dead = [slots[n] for n, end in last.items() if end == index and n not in results]
        steps.append((run, given, made, dead))
    wanted = [slots[node] if isinstance(node, fx.Node) else None for node in results]
    more = [None] * (len(slots) - len(placeholders))

    def stage(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        values: list[Any] = [*arguments, *more]
        arguments.clear()
        for run, given, made, dead in steps:
            for slot, value in zip(made, run([values[slot] for slot in given]), strict=True):
                values[slot] = value
            for slot in dead:
                values[slot] = None
        return [None if slot is None else values[slot] for slot in wanted]

    return stage


def _call(graph: fx.GraphModule) -> Stage:
    run = graph.forward
    return lambda arguments: run(*arguments)
