"""Split backward passes: first the gradients that earlier stages wait for, then those of weights.

Before   (%dx, %dw) = backward1(%g, %h, %w)         dx = g @ w; dw = h.T @ g; w..grad += dw
After    (%dx) = backward1(%g, %w)                  dx = g @ w
         (%dw) = weights1(%g, %h)                   dw = h.T @ g; w..grad += dw
Keeps    every operator and its operands, so every bit. Gradients are summed in the same order.
Source   "Zero Bubble Pipeline Parallelism" (Qi et al., 2023), section 2.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby

from torch import fx

from ipu_dynamo.ops.graph_queries import needed_for
from ipu_dynamo.passes.graph.extract import Cut, Extraction, Subgraph
from ipu_dynamo.passes.graph.gradient_sums import loop_of
from ipu_dynamo.passes.joint.partition import repeated
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Part, Partitioned, PartWrite
from ipu_dynamo.program import Direction, graph_outputs
from ipu_dynamo.program.ir.made_names import made_of

EARLY, LATE = range(2)  # the two pieces


class SplitWeightGradients(Pass):
    """The pass, for a zero-bubble schedule."""

    level = "parts"

    def __call__(self, partitioned: Partitioned) -> Partitioned:
        read = partitioned.reads
        passes = groupby(partitioned.parts, lambda part: (part.stage, part.direction, part.phase))
        parts = [piece for _, turns in passes for piece in _split_turns(list(turns), read)]
        if len(parts) == len(partitioned.parts):
            return partitioned
        return replace(partitioned, parts=tuple(parts))


def _split_turns(turns: Sequence[Part], read: Collection[str]) -> list[Part]:
    """Split the parts of a stage pass between exchanges of replicas.

    Weight gradients come last, unless a later turn writes the same sums, or changes their inputs.
    """
    early: list[Part] = []
    late: list[Part] = []
    for number, part in enumerate(turns, 1):
        first, *second = _split(part, read)
        later = {write.target for turn in turns[number:] for write in turn.writes}
        if any(later & {*(w.target for w in p.writes), *p.inputs} for p in second):
            first, second = part, []
        early.append(first)
        late += second
    return [*early, *late]


def _split(part: Part, read: Collection[str]) -> list[Part]:
    """The part without its weight gradients, and the part that computes those.

    A gradient that a loop can write while it runs is written where that runs.

    Args:
        read: names that other parts read, or that are returned.
    """
    if part.direction == "weights":
        return [part]
    nodes = list(part.graph.graph.nodes)
    names = dict(zip((n for n in nodes if n.op == "placeholder"), part.inputs, strict=True))
    outputs = dict(zip(part.outputs, graph_outputs(part.graph), strict=True))
    buffers = tuple(write for write in part.writes if write.rule == "buffer")
    sums = tuple(write for write in part.writes if write.rule != "buffer")
    kept = {name for name in part.outputs if name in read} | {write.value for write in buffers}
    kept |= set(part.outputs) - {write.value for write in sums}
    early = _needed(nodes, {outputs[name] for name in kept})
    counted = {outputs[write.value] for write in sums if not write.parameter}
    early |= _counted_early(nodes, early, counted)
    looped = {write for write in sums if _loop_writes(write, outputs[write.value], early)}
    for write in looped:
        early |= _down_to(outputs[write.value], early)
    if not part.gradients or not any(n.op not in ("placeholder", "output") for n in early):
        return [part]
    known = {node: name for name, node in outputs.items() if name in kept}
    cut = Cut(
        place={n: int(n not in early) for n in nodes if n.op not in ("placeholder", "output")},
        inputs=names,
        name=lambda node: known.setdefault(node, made_of(node.name, f"stage{part.stage}")),
        repeats=lambda node, index: repeated(node),
    )
    extraction = Extraction(cut, (EARLY, LATE))
    first, second = extraction.pieces.values()
    for node in nodes:
        if node in early:
            extraction.value(node, EARLY)
    first.outputs = {n: extraction.value(outputs[n], EARLY) for n in outputs if n in kept}
    late_values = {outputs[write.value] for write in sums if write.parameter} - {
        outputs[write.value] for write in looped
    }
    for node in nodes:
        late = node.op not in ("placeholder", "output") and node not in early
        if late or node in late_values:
            extraction.value(node, LATE)
    writes: list[list[PartWrite]] = [[], []]
    for write in sums:
        node = outputs[write.value]
        if write in looped or (not write.parameter and node in early):
            first.outputs.setdefault(write.value, extraction.value(node, EARLY))
            writes[EARLY].append(write)
        else:
            own = write if write.value not in first.outputs else _renamed(write, part.stage)
            second.outputs[own.value] = extraction.value(node, LATE)
            writes[LATE].append(own)
    writes[EARLY] += buffers
    if {write.target for write in buffers} & second.inputs.keys():
        return [part]  # it would read a variable after its change
    return [
        _finished(part, first, part.direction, writes[EARLY]),
        _finished(part, second, "weights", writes[LATE]),
    ]


def _loop_writes(write: PartWrite, node: fx.Node, early: Collection[fx.Node]) -> bool:
    """Whether the loop of a serialised loss, which runs early, can write a gradient itself."""
    loop = loop_of(node) if write.rule in ("store", "+=") and write.parameter else None
    return loop is not None and loop in early


def _down_to(node: fx.Node, early: Collection[fx.Node]) -> set[fx.Node]:
    """A view, and all that it looks at that is not `early`."""
    chain = set()
    while node not in early:
        chain.add(node)
        (node,) = node.all_input_nodes
    return chain


def _renamed(write: PartWrite, stage: int) -> PartWrite:
    """The same of a value that the first part makes: the second returns a copy of it."""
    return replace(write, value=made_of(write.value, f"weights{stage}"))


def _needed(nodes: list[fx.Node], results: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that `results` need; all others are for accumulators only."""
    needed = needed_for(results)
    for node in nodes:  # an operator with several results is not computed twice
        if node.target is operator.getitem and node.args[0] in needed:
            needed.add(node)
    return needed


def _counted_early(
    nodes: list[fx.Node], early: set[fx.Node], counted: set[fx.Node]
) -> set[fx.Node]:
    """Return the nodes that count elements of `early` gradients, so that these need not be kept.

    Args:
        counted: the numbers of elements that are added to counters.
    """
    counting: set[fx.Node] = set()
    for node in reversed(nodes):
        users = [user for user in node.users if user.op != "output"]
        only = bool(users) and counting.issuperset(users) and len(users) == len(node.users)
        if node.op == "call_function" and (node in counted or only):
            counting.add(node)
    known = set(early)
    for node in nodes:
        if node in counting and known.issuperset(node.all_input_nodes):
            known.add(node)
    return known if known & counting else set()


def _finished(
    part: Part, piece: Subgraph, direction: Direction, writes: Sequence[PartWrite]
) -> Part:
    """The part that a complete piece is."""
    return Part(
        stage=part.stage,
        direction=direction,
        ipu=part.ipu,
        graph=piece.finish(),
        inputs=tuple(piece.inputs),
        outputs=tuple(piece.outputs),
        writes=tuple(writes),
        turn=0 if direction == "weights" else part.turn,
    )
