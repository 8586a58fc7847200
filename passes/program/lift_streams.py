"""Pass the numbers of random streams to equal parts, so that they become one function.

Before   forward0 draws with %key + 3 and %key + 4, forward1 with %key + 5 and %key + 6
After    forward0(..., %key, %.streams0) and forward1(..., %key, %.streams1) are one function, which
         adds its last input to the key; .streams0 and .streams1 are constants
Keeps    the numbers that are drawn, to the last bit: the sums are of integers, modulo 2**32. Parts
         that are equal to no other part keep the numbers in their graphs.
Source   design of this project: equal parts are one function, and differ by what they are given.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import getitem
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.capture import Joint, Placeholder
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.builder import call, new_input
from ipu_dynamo.passes.graph.extract import copied
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import STREAM, WORDS, offset
from ipu_dynamo.passes.joint.random_numbers.counter_random import key_input
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Part, Partitioned
from ipu_dynamo.program import RECOMPUTED
from ipu_dynamo.program.ir.function import structural_key
from ipu_dynamo.program.ir.made_names import alone
from ipu_dynamo.program.machine_marks import run_nothing

STREAMS = re.compile(re.escape(alone("streams")) + r"\d+")  # names of the constants


@dataclass(frozen=True, slots=True)
class Lifted:
    """A graph that draws with streams that it is given.

    Args:
        graph: its last input, i32[n, 2], has the numbers that the streams add to the key. It is the
            part's graph if that draws nothing.
        streams: their numbers, in the order of operators.
    """

    graph: fx.GraphModule
    streams: tuple[int, ...]

    @property
    def key(self) -> str:
        """Equal for parts that differ in their streams only."""
        return structural_key(self.graph)


def lift(original: fx.GraphModule) -> Lifted:
    """A copy of a part's graph that takes its streams."""
    if not any(STREAM in node.meta for node in original.graph.nodes):
        return Lifted(original, ())
    graph, _ = copied(original.graph)
    words = [node for node in graph.nodes if STREAM in node.meta]
    draws = [list(group) for _, group in groupby(words, lambda node: node.meta[STREAM][1])]
    streams = tuple(draw[0].meta[STREAM][1] for draw in draws)
    key = words[0].args[0].args[0]
    given = new_input(graph, "streams", list(graph.find_nodes(op="placeholder"))[-1])
    run_nothing(given)
    given.meta["val"] = key.meta["val"].new_empty(len(streams), WORDS)
    with graph.inserting_before(words[0]):
        keys = _call(words[0], aten.add.Tensor, given, key)
        flat = _call(words[0], aten.view.default, keys, [len(streams) * WORDS])
        parts = _call(words[0], aten.unbind.int, flat)
    for number, draw in enumerate(draws):
        for node in draw:
            place = number * WORDS + node.meta[STREAM][0]
            with graph.inserting_before(node):
                word = _call(node, getitem, parts, place)
            selected = node.args[0]
            node.replace_all_uses_with(word)
            graph.erase_node(node)
            if not selected.users:
                graph.erase_node(selected)
    return Lifted(module_of(graph, original), streams)


def _call(origin: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Insert a call of this computer, which is recomputed if the node in its place was."""
    node = run_nothing(call(origin.graph, target, *args, origin=origin))
    if origin.meta.get(RECOMPUTED):
        node.meta[RECOMPUTED] = True
    return node


def plan(parts: Sequence[Part]) -> dict[int, Lifted]:
    """The parts, by their places, that differ from others in their streams only."""
    lifted = {place: lift(part.graph) for place, part in enumerate(parts)}
    alike: dict[str, list[int]] = {}
    for place, one in lifted.items():
        if one.streams:
            alike.setdefault(one.key, []).append(place)
    return {
        place: lifted[place]
        for places in alike.values()
        if len({lifted[place].streams for place in places}) > 1
        for place in places
    }


class LiftStreams(Pass):
    """The pass."""

    level = "parts"

    def applies(self, partitioned: Partitioned, contents: Contents) -> bool:
        return STREAM in contents.marks

    def __call__(self, partitioned: Partitioned) -> Partitioned:
        planned = plan(partitioned.parts)
        if not planned:
            return partitioned
        names: dict[tuple[int, tuple[int, ...]], str] = {}  # by IPU and streams
        parts = list(partitioned.parts)
        for place, lifted in planned.items():
            part = parts[place]
            name = names.setdefault((part.ipu, lifted.streams), alone(f"streams{len(names)}"))
            parts[place] = replace(part, graph=lifted.graph, inputs=(*part.inputs, name))
        key = key_input(partitioned.capture)
        for (_, streams), name in names.items():
            _add_constant(partitioned.capture, key, name, streams)
        return replace(partitioned, parts=tuple(parts))


def _add_constant(capture: Joint, key: fx.Node, name: str, streams: Sequence[int]) -> None:
    """Describe a constant that parts read, as the last input of the graph that was cut."""
    numbers = [[offset(word, stream) for word in range(WORDS)] for stream in streams]
    node = new_input(capture.graph.graph, name, capture.placeholder_nodes[-1])
    node.meta["val"] = key.meta["val"].new_empty(len(streams), WORDS)
    capture.placeholders = (*capture.placeholders, Placeholder(name, "constant"))
    capture.report.tensors = {
        **capture.report.tensors,
        name: torch.tensor(numbers, dtype=torch.int32),
    }
    capture.graph.recompile()
