"""Find the words from which the functions of a program count random numbers.

A draw adds a number to each word of a key. The number is in the graph, or `LiftStreams` passes it
in a constant. Both are the same word, if the numbers are.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.program.lift_streams import STREAMS

Word = tuple[fx.Node, int, int]  # the key, a place in it, and the number that is added


def streams_in(constants: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The numbers in those constants that have numbers of streams, by name."""
    return {
        name: tuple(tensor.flatten().tolist())
        for name, tensor in constants.items()
        if STREAMS.fullmatch(name)
    }


def words_of(graph: fx.Graph, streams: Mapping[fx.Node, Sequence[int]]) -> dict[fx.Node, Word]:
    """The nodes of a function that are words.

    Args:
        streams: the numbers in inputs.
    """
    return {node: word for node in graph.nodes for word in _word_of(node, streams)}


def _word_of(node: Any, streams: Mapping[fx.Node, Sequence[int]]) -> Iterator[Word]:
    if node.target is aten.add.Tensor and not node.kwargs:
        part, number = node.args
        if type(number) is int and _is(part, aten.select.int) and _is_key(part.args[0]):
            key, dim, place = part.args
            if dim == 0:
                yield key, place, number
    elif node.target is getitem and _is(node.args[0], aten.unbind.int):
        parts, place = node.args
        flat = parts.args[0]
        if _is(flat, aten.view.default) and _is(flat.args[0], aten.add.Tensor):
            numbers, key = flat.args[0].args
            if numbers in streams and _is_key(key):
                yield key, place % key.meta["val"].numel(), streams[numbers][place]


def _is(value: object, target: object) -> bool:
    return isinstance(value, fx.Node) and value.target is target


def _is_key(value: object) -> bool:
    if not isinstance(value, fx.Node) or value.op != "placeholder":
        return False
    tensor = value.meta["val"]
    return bool(tensor.dtype == torch.int32 and tensor.dim() == 1)
