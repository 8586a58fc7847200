"""Make repeated blocks one function that is called many times, so that it is compiled once.

Before   (%y) = forward0(%x, %w0, ..., %w47)        48 equal layers
After    (%h1) = forward0_block(%x, %w0);  (%h2) = forward0_block(%h1, %w1);  ...
Keeps    every operator and their order, so every bit; views and constants are repeated where they
         are read. Blocks are looked for as if functions wrote their gradients and buffers: so they
         are compiled. They are equal when structure, layouts and numbers are: other constants,
         other probabilities or other sizes are another function. Other streams of random numbers
         are not: `LiftStreams` passes these to the blocks. Sums are written after the piece that
         computes the value, buffers after the last.
Source   PopART user guide, "Subgraph outlining": repeated blocks share their code.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import ceil
from operator import getitem

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import BACKWARD
from ipu_dynamo.ops.graph_queries import is_view, makes_constant, root
from ipu_dynamo.ops.operator_costs import estimated_seconds
from ipu_dynamo.ops.serialized_loss import serialized_loss
from ipu_dynamo.options import Outlining
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.add_writes import GraphWrite, add_writes
from ipu_dynamo.passes.graph.builder import new_input
from ipu_dynamo.passes.graph.extract import Cut, Extraction, Subgraph, copied
from ipu_dynamo.passes.graph.repeats import LEAST, Run, find_runs
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import STREAM
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Part, Partitioned, PartWrite
from ipu_dynamo.passes.program.lift_streams import lift
from ipu_dynamo.program import Direction, graph_outputs
from ipu_dynamo.program.ir.layout import Layout
from ipu_dynamo.program.text.graph_text import node_text
from ipu_dynamo.program.text.literals import write

_WORTH_A_CALL = 2e-4  # estimated seconds of a block; the call costs little in comparison


@dataclass(frozen=True, slots=True)
class Blocks:
    """Equally long stretches of a part's operators, one after the other.

    Args:
        starts: the first operator of each, and last the one after them, or the output.
    """

    starts: tuple[fx.Node, ...]


def plan(graph: fx.Graph, worth: float) -> list[Blocks]:
    """Stretches that may be equal, several periods long if one is not `worth` a call, in seconds.

    They begin where the least memory passes from one to the next. Reads the graph only.
    """
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    operators = nodes[:-1]
    found = []
    layouts = {node: _layout(node) for node in graph.nodes}
    for run in find_runs([_token(node, layouts) for node in operators]):
        first = run.start + _narrowest(operators, run)
        seconds = estimated_seconds(operators[run.start : run.start + run.period])
        count = (run.stop - first) // run.period
        together = _together(count, ceil(worth / max(seconds, 1e-9)))
        if count >= LEAST * together:
            step = run.period * together
            places = range(first, first + count // together * step + 1, step)
            found.append(Blocks(tuple(nodes[place] for place in places)))
    return found


def _together(count: int, least: int) -> int:
    """How many of `count` periods make a block, at least `least`, so that few are left over."""
    sizes = range(max(least, 1), min(2 * max(least, 1), count // LEAST) + 1)
    return min(sizes, key=lambda size: (count % size, size), default=max(least, 1))


def _token(node: fx.Node, layouts: Mapping[fx.Node, str]) -> object:
    """Return a token that is the same for equal operators of two blocks, except inputs."""
    if STREAM in node.meta:
        return node.meta[STREAM][0]
    return node_text(node, partial(write, name_of=layouts.__getitem__, otherwise=repr), str)


def _layout(node: fx.Node) -> str:
    value = node.meta.get("val")
    return str(Layout.of(value)) if isinstance(value, Tensor) else "-"


def _narrowest(operators: Sequence[fx.Node], run: Run) -> int:
    """The operator of a period before which the fewest bytes are alive that the run has made."""
    place: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for index in range(run.start, run.stop):
        node = operators[index]
        source = node.args[0] if node.target is getitem else None
        place[node] = place.get(source, index) if isinstance(source, fx.Node) else index
        for read in node.all_input_nodes:
            last[root(read)] = index
    change = [0] * (run.stop - run.start + 1)
    for node, end in last.items():
        value = node.meta["val"]
        if node in place and isinstance(value, Tensor):
            change[place[node] + 1 - run.start] += value.nbytes
            change[end + 1 - run.start] -= value.nbytes
    alive = list(accumulate(change))
    sums = [sum(alive[offset :: run.period][: run.count]) for offset in range(run.period)]
    return min(range(run.period), key=sums.__getitem__)


def plan_pure(part: Part, worth: float) -> list[Blocks]:
    """The stretches of a part that may be equal, as its graph with its writes has them."""
    graph, originals = _with_writes(part)
    found = []
    for blocks in plan(graph, worth):
        starts = tuple(_original(node, originals, part.graph.graph) for node in blocks.starts)
        if len(set(starts)) == len(starts) and not _cuts_loss(part.graph.graph, starts):
            found.append(Blocks(starts))
    return found


def _with_writes(part: Part) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a copy of a part's graph that writes in place, and the original of each node."""
    graph, copies = copied(part.graph.graph)
    values = dict(zip(part.outputs, graph_outputs(part.graph), strict=True))
    targets: dict[str, fx.Node] = {}
    last = next(reversed(list(graph.find_nodes(op="placeholder"))), None)
    for name in dict.fromkeys(n for w in part.writes for n in (w.target, w.weight) if n):
        last = targets[name] = new_input(graph, name, last)
    writes = []
    for one in part.writes:
        value, target = copies[values[one.value]], targets[one.target]
        target.meta["val"] = value.meta["val"]
        weight = targets.get(one.weight or "")
        if weight is not None:
            weight.meta["val"] = value.meta["val"].new_empty((), dtype=torch.float32)
        writes.append(GraphWrite(target, value, one.rule, weight))
    add_writes(graph, writes)
    return graph, {copy: node for node, copy in copies.items()}


def _original(node: fx.Node, originals: Mapping[fx.Node, fx.Node], graph: fx.Graph) -> fx.Node:
    """Return the original of a node; for a write that of the next copy, or the output."""
    while node not in originals and node.op != "output":
        node = node.next
    return originals.get(node) or graph.output_node()


def _cuts_loss(graph: fx.Graph, starts: Sequence[fx.Node]) -> bool:
    """Whether a start is between a serialised loss and the readers of its sums: they are fused."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for loss in graph.find_nodes(op="call_function", target=serialized_loss):
        readers = [place[reader] for item in loss.users for reader in item.users]
        if any(place[loss] < place[start] <= max(readers, default=0) for start in starts):
            return True
    return False


def outline_part(part: Part, worth: float, taken: set[str]) -> list[Part]:
    """A part cut at its blocks, of which there are three or more equal ones; else the part."""
    found = plan_pure(part, worth)
    if not found:
        return [part]
    operators = [n for n in part.graph.graph.nodes if n.op not in ("placeholder", "output")]
    position = {node: index for index, node in enumerate(operators)}
    places = [[position.get(n, len(operators)) for n in blocks.starts] for blocks in found]
    stretches = {start for starts in places for start in starts[:-1]}
    starts = sorted({0, *(start for starts in places for start in starts)} - {len(operators)})
    pieces = _cut_part(part, starts, taken)
    keys = {
        start: lift(piece.graph).key
        for start, piece in zip(starts, pieces, strict=True)
        if start in stretches
    }
    counts = Counter(keys.values())
    blocks = {start for start, key in keys.items() if counts[key] >= LEAST}
    if not blocks:
        return [part]
    ends = {end for begin, end in pairwise(starts) if begin in blocks}
    cuts = sorted({0} | blocks | ends)
    if cuts != starts:
        pieces = _cut_part(part, cuts, taken)
    return _named(part, pieces, [start in blocks for start in cuts])


def _named(part: Part, pieces: Sequence[Part], blocks: Sequence[bool]) -> list[Part]:
    """The pieces with names for their functions."""
    named = []
    rests = 0
    for piece, block in zip(pieces, blocks, strict=True):
        if block:
            named.append(replace(piece, name=f"{_direction(piece)}{part.stage}_block"))
        else:
            rests += 1
            named.append(replace(piece, name=f"{part.function_name}_{rests}"))
    return named


def _direction(block: Part) -> Direction:
    """The pass that a block belongs to; a part of the last stage does both."""
    if block.direction != "forward_backward":
        return block.direction
    backward = any(node.meta.get(BACKWARD) for node in block.graph.graph.nodes)
    return "backward" if backward else "forward"


def _cut_part(part: Part, starts: Sequence[int], taken: Collection[str]) -> list[Part]:
    """Return the pieces of `part`; a value that a later piece reads is a result of its piece.

    Args:
        starts: positions among the operators, ascending from 0: where pieces begin.
        taken: names that new results must not have.
    """
    return _Cutter(part, starts, taken).parts()


class _Cutter(Extraction):
    """Cut at positions."""

    def __init__(self, part: Part, starts: Sequence[int], taken: Collection[str]) -> None:
        self.part = part
        nodes = list(part.graph.graph.nodes)
        inputs = (node for node in nodes if node.op == "placeholder")
        place = _places([n for n in nodes if n.op not in ("placeholder", "output")], starts)
        self.results: dict[str, fx.Node] = dict(
            zip(part.outputs, graph_outputs(part.graph), strict=True)
        )
        self.known = {node: name for name, node in self.results.items()}
        self.taken = {*taken, *part.inputs, *part.outputs}
        super().__init__(
            Cut(
                place=place,
                inputs=dict(zip(inputs, part.inputs, strict=True)),
                name=self.name,
                repeats=lambda node, index: _repeats(node, place),
            ),
            range(len(starts)),
        )

    def parts(self) -> list[Part]:
        self.fill()
        place, last = self.cut.place, len(self.pieces) - 1
        for name, node in self.results.items():
            index = place.get(node, last)
            self.pieces[index].outputs[name] = self.value(node, index)
        writes: dict[int, list[PartWrite]] = {index: [] for index in self.pieces}
        for one in self.part.writes:
            writes[last if one.rule == "buffer" else self.place_of(one.value)].append(one)
        position = {node: index for index, node in enumerate(place)}
        order = {name: position.get(node, -1) for node, name in self.known.items()}
        return [
            _part(self.part, piece, order, writes[index]) for index, piece in self.pieces.items()
        ]

    def place_of(self, result: str) -> int:
        """The piece that gives a result of the part."""
        return next(index for index, piece in self.pieces.items() if result in piece.outputs)

    def name(self, node: fx.Node) -> str:
        """Return the name of a value outside the piece that computes it."""
        if node not in self.known:
            name = node.name
            while name in self.taken:
                name += "'"
            self.taken.add(name)
            self.known[node] = name
        return self.known[node]


def _repeats(node: fx.Node, place: Mapping[fx.Node, int]) -> bool:
    """Whether pieces that read `node` compute it again.

    These are constants, and views of values from another piece.
    """
    return makes_constant(node) or (is_view(node) and place.get(root(node)) != place[node])


def _places(operators: Sequence[fx.Node], starts: Sequence[int]) -> dict[fx.Node, int]:
    """The piece of every operator; an operator's results are picked where it is."""
    first = set(starts)
    places: dict[fx.Node, int] = {}
    place = -1
    for index, node in enumerate(operators):
        place += index in first
        source = node.args[0] if node.target is getitem else None
        places[node] = places[source] if isinstance(source, fx.Node) else place
    return places


def _part(
    part: Part, piece: Subgraph, order: Mapping[str, int], writes: Sequence[PartWrite]
) -> Part:
    """Finish a piece: remove needless repetitions, and sort its results by operator."""
    piece.outputs = dict(sorted(piece.outputs.items(), key=lambda item: order.get(item[0], -1)))
    piece.prune(lambda node: is_view(node) or makes_constant(node))
    return replace(
        part,
        graph=piece.finish(),
        inputs=tuple(piece.inputs),
        outputs=tuple(piece.outputs),
        writes=tuple(writes),
    )


class Outline(Pass):
    """The pass.

    Args:
        mode: `auto` makes blocks that are worth a call, several layers together if one is small;
            True makes all blocks of which there are three; False makes none.
    """

    level = "parts"

    mode: Outlining = "auto"

    def applies(self, partitioned: Partitioned, contents: Contents) -> bool:
        return self.mode is not False

    def __call__(self, partitioned: Partitioned) -> Partitioned:
        if self.mode is False:
            return partitioned
        worth = _WORTH_A_CALL if self.mode == "auto" else 0.0
        taken = partitioned.named
        parts: list[Part] = []
        for part in partitioned.parts:
            pieces = outline_part(part, worth, taken)
            taken.update(name for piece in pieces for name in piece.outputs)
            parts += pieces
        if len(parts) == len(partitioned.parts):
            return partitioned
        return replace(partitioned, parts=tuple(parts))
