"""Count streams of random numbers from block to block, so that equal blocks draw alike.

Before   block 0 draws with %key + 3, block 1 with %key + 5, block 2 with %key + 7
After    every block draws with %base and hands on %base + 2; the first %base is %key + 3
Keeps    the numbers, to the last bit: the sums are of integers, modulo 2**32.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import fx

from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import STREAM, offset

aten = torch.ops.aten


def shift_streams(graph: fx.Graph, runs: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    """Rewrite the draws of blocks whose streams are equally far apart.

    Args:
        runs: of each, the first operators of its blocks, and the node after them.

    Returns:
        What the last block of each run hands on, although nobody reads it.
    """
    return [node for starts in runs for node in _shift(graph, starts)]


def _shift(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[fx.Node]:
    draws = [_draws(*ends) for ends in pairwise(starts)]
    if not draws[0] or len({len(of) for of in draws}) > 1:
        return []
    chains: dict[tuple[int, int], list[int]] = {}  # word and distance -> places among the draws
    for place, streams in enumerate(zip(*draws, strict=True)):
        words = {node.meta[STREAM][0] for node in streams}
        numbers = [node.meta[STREAM][1] for node in streams]
        distances = {b - a for a, b in pairwise(numbers)}
        if len(words) > 1 or len(distances) > 1:
            return []
        chains.setdefault((*words, *distances), []).append(place)
    return [
        _chain(graph, starts, [[of[place] for place in places] for of in draws], word, distance)
        for (word, distance), places in chains.items()
    ]


def _draws(start: fx.Node, stop: fx.Node) -> list[fx.Node]:
    """The nodes in a block that add to the key."""
    found = []
    while start is not stop:
        if STREAM in start.meta:
            found.append(start)
        start = start.next
    return found


def _chain(
    graph: fx.Graph, starts: Sequence[fx.Node], draws: list[list[fx.Node]], word: int, distance: int
) -> fx.Node:
    """Let the blocks draw relative to a base; what the last one hands on."""
    leader = draws[0][0]
    first = leader.meta[STREAM][1]
    with graph.inserting_before(starts[0]):
        selected = leader.args[0]
        assert isinstance(selected, fx.Node)
        key = call(graph, aten.select.int, *selected.args, origin=leader)
        base = call(graph, aten.add.Tensor, key, offset(word, first), origin=leader)
    for block, stop in zip(draws, starts[1:], strict=True):
        number = block[0].meta[STREAM][1]
        for node in block:
            distant = node.meta.pop(STREAM)[1] - number
            node.args = (base, offset(word, distant - 1))
        with graph.inserting_before(stop):
            base = call(graph, aten.add.Tensor, base, offset(word, distance - 1), origin=block[-1])
    return base
