"""Split backward passes: first the gradients that earlier stages wait for, then those of weights.

Before   (%dx) = backward1(%g, %h, %w, %w.grad)     dx = g @ w; w.grad += h.T @ g
After    (%dx) = backward1(%g, %w)                  dx = g @ w
         () = weights1(%g, %h, %w.grad)             w.grad += h.T @ g
Keeps    every operator and its operands, so every bit. Gradients are summed in the same order.
Source   "Zero Bubble Pipeline Parallelism" (Qi et al., 2023), section 2.
"""

import operator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.joint.partition import Draft, accumulator, repeated
from ipu_dynamo.passes.levels import Level, Part, Partitioned
from ipu_dynamo.program import Direction, written_by, written_inputs


@dataclass(frozen=True)
class SplitWeightGradients:
    """The pass, for a zero-bubble schedule."""

    name: ClassVar[str] = "SplitWeightGradients"
    level: ClassVar[Level] = "parts"

    def __call__(self, partitioned: Partitioned) -> Partitioned:
        parts = [piece for part in partitioned.parts for piece in _split(part)]
        if len(parts) == len(partitioned.parts):
            return partitioned
        return replace(partitioned, parts=tuple(parts))


def _split(part: Part) -> list[Part]:
    """The part without its weight gradients, and the part that computes those."""
    nodes = list(part.graph.graph.nodes)
    sums = {accumulator(name) for name in part.gradients}
    names = dict(zip((n for n in nodes if n.op == "placeholder"), part.inputs, strict=True))
    late = sums | {part.counter} if part.counter else sums
    early = _needed_early(nodes, {node for node, name in names.items() if name in late})
    early |= _counted_early(nodes, early, names, part.counter)
    if not sums or not any(n.op not in ("placeholder", "output") for n in early):
        return [part]
    outputs = dict(zip(part.outputs, nodes[-1].args[0], strict=True))
    first, second = Draft(), Draft()
    for node in nodes:
        if node in early:
            _copy(node, first, names)
    first.outputs = {name: first.copies[node] for name, node in outputs.items()}
    known = {node: name for name, node in outputs.items()}

    def bring(node: fx.Node) -> None:
        """Make `node`, which the first part may have computed, known to the second."""
        if node in second.copies:
            return
        if node in names or node not in early or repeated(node):
            for source in node.all_input_nodes:
                bring(source)
            _copy(node, second, names)
            return
        name = known.setdefault(node, f"{node.name}.stage{part.stage}")
        first.outputs.setdefault(name, first.copies[node])
        second.copies[node] = second.take(name, node.meta["val"])

    for node in nodes:
        if node.op not in ("placeholder", "output") and node not in early:
            bring(node)
    changed = {names[n] for n in written_inputs(part.graph.graph)} - late
    if changed & second.inputs.keys():
        return [part]  # it would read a variable after its change
    return [
        _finished(part, first, part.direction, ()),
        _finished(part, second, "weights", part.gradients),
    ]


def _needed_early(nodes: list[fx.Node], sums: set[fx.Node]) -> set[fx.Node]:
    """What results and changed variables need; all else is for the accumulators `sums` only."""
    needed: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or node in needed or set(written_by(node)) - sums:
            needed.add(node)
            needed.update(node.all_input_nodes)
    for node in nodes:  # an operator with several results is not computed twice
        if node.target is operator.getitem and node.args[0] in needed:
            needed.add(node)
    return needed


def _counted_early(
    nodes: list[fx.Node], early: set[fx.Node], names: dict[fx.Node, str], counter: str | None
) -> set[fx.Node]:
    """What counts elements of gradients that are there `early`, so that they need not be kept."""
    counters = {node for node, name in names.items() if name == counter}
    counting: set[fx.Node] = set()
    for node in reversed(nodes):
        adds = not counters.isdisjoint(node.all_input_nodes)
        only = bool(node.users) and counting.issuperset(node.users)
        if node.op == "call_function" and (adds or only):
            counting.add(node)
    known = early | counters
    for node in nodes:
        if node in counting and known.issuperset(node.all_input_nodes):
            known.add(node)
    return known if known & counting else set()


def _copy(node: fx.Node, draft: Draft, names: dict[fx.Node, str]) -> None:
    if node.op == "output":
        return
    if node in names:
        copy = draft.take(names[node], node.meta["val"])
        copy.meta.update(node.meta)
        draft.copies[node] = copy
    else:
        draft.copies[node] = draft.graph.node_copy(node, lambda n: draft.copies[n])


def _finished(part: Part, draft: Draft, direction: Direction, gradients: tuple[str, ...]) -> Part:
    """The piece of `part` that a complete draft is."""
    result = draft.graph.output(tuple(draft.outputs.values()))
    result.meta["val"] = None
    graph = module_of(draft.graph)
    graph.graph.lint()
    return Part(
        stage=part.stage,
        direction=direction,
        ipu=part.ipu,
        graph=graph,
        inputs=tuple(draft.inputs),
        outputs=tuple(draft.outputs),
        gradients=gradients,
        counter=part.counter if part.counter in draft.inputs else None,
    )
