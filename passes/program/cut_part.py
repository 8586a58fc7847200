"""Cut a part into pieces that run one after the other.

Before   (%y) = forward0(%x, %v, %w)                y = relu(x @ v) @ w
After    (%h) = forward0_1(%x, %v)                  h = relu(x @ v)
         (%y) = forward0_2(%h, %w)                  y = h @ w
Keeps    every operator and their order, so every bit; views and constants are repeated where they
         are read. Sums are written behind the piece that makes the value, buffers behind the last.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import getitem

from torch import fx

from ipu_dynamo.ops.graph_queries import is_view, makes_constant, root
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.joint.partition import Draft
from ipu_dynamo.passes.levels import Part
from ipu_dynamo.program import graph_outputs


def cut_part(
    part: Part, starts: Sequence[int], taken: Collection[str] = (), kept: Sequence[fx.Node] = ()
) -> list[Part]:
    """The pieces of `part`; what one makes and a later one reads is a result of the first.

    Args:
        starts: positions among the operators, ascending from 0: where pieces begin.
        taken: names that new results must not have.
        kept: values that are results although nobody reads them.
    """
    cutter = _Cutter(part, starts, taken)
    for node in kept:
        cutter.results[cutter.name(node)] = node
    return cutter.pieces()


class _Cutter:
    """Build the pieces. Invariant: a value is an output of the piece that makes it as soon as a
    later piece reads it."""

    def __init__(self, part: Part, starts: Sequence[int], taken: Collection[str]) -> None:
        self.part = part
        nodes = list(part.graph.graph.nodes)
        self.operators = [n for n in nodes if n.op not in ("placeholder", "output")]
        self.names = dict(
            zip((n for n in nodes if n.op == "placeholder"), part.inputs, strict=True)
        )
        self.place = _places(self.operators, starts)
        self.drafts = [Draft() for _ in starts]
        self.results: dict[str, fx.Node] = dict(
            zip(part.outputs, graph_outputs(part.graph), strict=True)
        )
        self.known = {node: name for name, node in self.results.items()}
        self.taken = {*taken, *part.inputs, *part.outputs}

    def pieces(self) -> list[Part]:
        for node in self.operators:
            self.copy(node, self.place[node])
        for name, node in self.results.items():
            place = self.place.get(node, len(self.drafts) - 1)
            self.drafts[place].outputs[name] = self.value(node, place)
        position = {node: index for index, node in enumerate(self.operators)}
        order = {name: position.get(node, -1) for node, name in self.known.items()}
        for write in self.part.writes:
            place = -1 if write.rule == "buffer" else self.place_of(write.value)
            self.drafts[place].writes.append(write)
        return [_piece(self.part, draft, order) for draft in self.drafts]

    def place_of(self, result: str) -> int:
        """The piece that gives a result of the part."""
        return next(i for i, draft in enumerate(self.drafts) if result in draft.outputs)

    def copy(self, node: fx.Node, place: int) -> None:
        draft = self.drafts[place]
        for source in node.all_input_nodes:
            self.value(source, place)
        if node not in draft.copies:
            draft.copies[node] = draft.graph.node_copy(node, lambda n: draft.copies[n])

    def value(self, node: fx.Node, place: int) -> fx.Node:
        """The node that stands for `node` in a piece."""
        draft = self.drafts[place]
        if node in draft.copies:
            return draft.copies[node]
        if node in self.names:
            draft.copies[node] = draft.take(self.names[node], node.meta["val"])
            draft.copies[node].meta.update(node.meta)
        elif self.place[node] == place or self.is_repeated(node):
            self.copy(node, place)
        else:
            making = self.drafts[self.place[node]]
            making.outputs[self.name(node)] = making.copies[node]
            draft.copies[node] = draft.take(self.name(node), node.meta["val"])
        return draft.copies[node]

    def is_repeated(self, node: fx.Node) -> bool:
        """Whether pieces that read `node` make it themselves: constants, and views of what the
        piece that looks at it has not made."""
        base = root(node)
        return makes_constant(node) or (is_view(node) and self.place.get(base) != self.place[node])

    def name(self, node: fx.Node) -> str:
        """What a value is called outside the piece that makes it."""
        if node not in self.known:
            name = node.name
            while name in self.taken:
                name += "'"
            self.taken.add(name)
            self.known[node] = name
        return self.known[node]


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


def _piece(part: Part, draft: Draft, order: Mapping[str, int]) -> Part:
    """A finished draft: without what it need not repeat, its results in the order of operators."""
    outputs = dict(sorted(draft.outputs.items(), key=lambda item: order.get(item[0], -1)))
    result = draft.graph.output(tuple(outputs.values()))
    result.meta["val"] = None
    for node in reversed(draft.graph.nodes):
        if not node.users and (is_view(node) or makes_constant(node)):
            draft.graph.erase_node(node)
    for name, node in list(draft.inputs.items()):
        if not node.users:
            draft.graph.erase_node(draft.inputs.pop(name))
    graph = module_of(draft.graph)
    graph.graph.lint()
    inputs = tuple(draft.inputs)
    return replace(
        part,
        graph=graph,
        inputs=inputs,
        outputs=tuple(outputs),
        writes=tuple(draft.writes),
    )
