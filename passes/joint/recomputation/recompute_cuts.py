"""Find where to cut the forward pass of a stage, so that each piece can be repeated alone."""

from collections.abc import Sequence

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE
from ipu_dynamo.ops.graph_queries import nbytes, owner

_NEAR = 1.25  # a place is narrow if at most so many times the bytes of the narrowest cross it


def forward_of(graph: fx.Graph, stage: int) -> list[fx.Node]:
    """The forward operators of a stage, in order."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.meta.get(STAGE) == stage and not node.meta[BACKWARD]
    ]


def narrow_places(nodes: Sequence[fx.Node]) -> tuple[tuple[int, tuple[fx.Node, ...]], ...]:
    """Where few bytes go from earlier forward operators to later ones.

    Returns:
        For each place the operator before it, and the values that cross it; in order. Of
        neighbouring places with the same values there is only the first.
    """
    position = {node: index for index, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if owner(source) in position:
                last[owner(source)] = position[node]
    live: dict[fx.Node, None] = {}
    crossing: list[tuple[int, tuple[fx.Node, ...]]] = []
    for index, node in enumerate(nodes):
        if owner(node) is node:
            live[node] = None
        for value in [v for v in live if last.get(v, -1) <= index]:
            del live[value]
        whole = all(not isinstance(value.meta["val"], tuple | list) for value in live)
        if live and whole and (not crossing or crossing[-1][1] != tuple(live)):
            crossing.append((index, tuple(live)))
    inner = [place for place in crossing if place[0] + 1 < len(nodes)]
    least = min((_size(values) for _, values in inner), default=0)
    return tuple(place for place in inner if _size(place[1]) <= _NEAR * least)


def evenly(
    places: Sequence[tuple[int, tuple[fx.Node, ...]]], nodes: Sequence[fx.Node], count: int
) -> tuple[fx.Node, ...]:
    """The values that cross `count` of the places, which cut the results into equal shares."""
    sums = [0]
    for node in nodes:
        sums.append(sums[-1] + (nbytes(node) if owner(node) is node else 0))
    chosen: dict[fx.Node, None] = {}
    for share in range(1, count + 1):
        target = sums[-1] * share / (count + 1)
        _, values = min(places, key=lambda place: abs(sums[place[0] + 1] - target))
        chosen |= dict.fromkeys(values)
    return tuple(chosen)


def _size(values: Sequence[fx.Node]) -> int:
    return sum(nbytes(value) for value in values)
