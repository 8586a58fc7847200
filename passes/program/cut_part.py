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
from ipu_dynamo.passes.graph.extract import Cut, Extraction, Piece
from ipu_dynamo.passes.levels import Part, PartWrite
from ipu_dynamo.program import graph_outputs


def cut_part(part: Part, starts: Sequence[int], taken: Collection[str] = ()) -> list[Part]:
    """The pieces of `part`; what one makes and a later one reads is a result of the first.

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
        for write in self.part.writes:
            writes[last if write.rule == "buffer" else self.place_of(write.value)].append(write)
        position = {node: index for index, node in enumerate(place)}
        order = {name: position.get(node, -1) for node, name in self.known.items()}
        return [
            _part(self.part, piece, order, writes[index]) for index, piece in self.pieces.items()
        ]

    def place_of(self, result: str) -> int:
        """The piece that gives a result of the part."""
        return next(index for index, piece in self.pieces.items() if result in piece.outputs)

    def name(self, node: fx.Node) -> str:
        """What a value is called outside the piece that makes it."""
        if node not in self.known:
            name = node.name
            while name in self.taken:
                name += "'"
            self.taken.add(name)
            self.known[node] = name
        return self.known[node]


def _repeats(node: fx.Node, place: Mapping[fx.Node, int]) -> bool:
    """Whether pieces that read `node` make it themselves: constants, and views of what the piece
    that looks at it has not made."""
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


def _part(part: Part, piece: Piece, order: Mapping[str, int], writes: Sequence[PartWrite]) -> Part:
    """A finished piece: without what it need not repeat, its results in the order of operators."""
    piece.outputs = dict(sorted(piece.outputs.items(), key=lambda item: order.get(item[0], -1)))
    piece.prune(lambda node: is_view(node) or makes_constant(node))
    return replace(
        part,
        graph=piece.finish(),
        inputs=tuple(piece.inputs),
        outputs=tuple(piece.outputs),
        writes=tuple(writes),
    )
