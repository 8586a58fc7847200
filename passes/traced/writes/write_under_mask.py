"""Choose between old and new values where a mask says which elements are written.

Before   %h = aten.clone(%x: f32[m,n])
         %y = aten.index_put_(%h, [%mask: b8[m]], %v: f32[n])     # no other index than a mask
After    %h = aten.clone(%x)
         %n = aten.where(aten.unsqueeze(%mask, -1), %v, %h)
         %y = aten.copy_(%h, %n)
Keeps    values, also with accumulate, where %h + %value is chosen; shapes, dtypes, source lines.
Source   NumPy's rules of advanced indexing: a mask of k dims stands for one dim, with an element
         for each that it selects.

The number of elements that a mask selects is unknown before it runs. A value that is the same for
all of them needs no count: its dim for them is missing or of size 1. If it has an element for each,
the write stays: `refuse_rows` names it if its gradient is asked for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.passes.levels import Level

_WRITES = (aten.index_put_.default, aten.index_put.default)
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision to compute `node` by choosing under its mask.

    Args:
        dim: the first dim of the written tensor that the mask covers.
        size: the shape of a view of the new value that broadcasts to the written tensor.
    """

    node: fx.Node
    dim: int
    size: tuple[int, ...]


def only_mask(node: fx.Node) -> fx.Node | None:
    """The mask under which `node`, a write, writes; None if it has another index, or none."""
    indices: Any = node.args[1]
    mask, *others = (index for index in indices if index is not None)
    assert isinstance(mask, fx.Node)
    return mask if _is_mask(mask) and mask.meta["val"].dim() and not others else None


def _choice(node: fx.Node) -> Iterator[Choice]:
    mask = only_mask(node)
    if mask is None:
        return
    indices: Any
    written, indices, value, *_ = node.args
    assert isinstance(written, fx.Node)
    assert isinstance(value, fx.Node)
    shape, covered = written.meta["val"].shape, mask.meta["val"].shape
    dim = indices.index(mask)
    stop = dim + len(covered)
    if shape[dim:stop] != covered:
        raise CompileError(
            f"a mask of shape {list(covered)} does not fit dims {dim} to {stop - 1} of the tensor "
            f"of shape {list(shape)} that is written",
            node=node,
            hint="give the mask the size of the tensor in each dim that it covers",
            id="value",
        )
    size = value.meta["val"].shape
    selected = len(size) - (len(shape) - stop) - 1  # the dim with an element for each selected
    if selected >= 0:
        if size[selected] != 1:
            return
        size = (*size[:selected], *(1 for _ in covered), *size[selected + 1 :])
    if not _broadcasts(size, shape):
        raise CompileError(
            f"a value of shape {list(value.meta['val'].shape)} does not fit what a mask of shape "
            f"{list(covered)} selects of a tensor of shape {list(shape)}",
            node=node,
            hint=f"give it the shape {list(shape[stop:])}, or one that broadcasts to it",
            id="value",
        )
    if value.meta["val"].dtype == written.meta["val"].dtype:
        yield Choice(node, dim, tuple(size))


def refuse_rows(graph: fx.Graph) -> None:
    """Raise for the first write under a mask that is left: its gradient has no known size."""
    for node in graph.nodes:
        if node.target in _WRITES and any(_is_mask(index) for index in node.args[1]):
            raise CompileError(
                "a write under a mask, of a value with an element for each that the mask selects, "
                "has no gradient of a size that is known when compiling",
                node=node,
                hint="x.masked_scatter(mask, value), with a mask that has the dims of x; with "
                "further indices, one mask for all: x[mask & (torch.arange(n) == i)] = value",
                id="value",
            )


def _is_mask(index: fx.Node | None) -> bool:
    return index is not None and index.meta["val"].dtype in _MASKS


def _broadcasts(size: Sequence[int], shape: Sequence[int]) -> bool:
    last = shape[len(shape) - len(size) :]
    return len(size) <= len(shape) and all(a in (1, b) for a, b in zip(size, last, strict=True))


class WriteUnderMask(GraphPass):
    """The pass.

    Args:
        level: of the graph; in that of torch.compile nothing is written in place any more.
    """

    level: Level = "traced"
    acts_on = _WRITES

    def plan(self, graph: fx.Graph) -> Iterator[Choice]:
        """Find writes that need no count of selected elements. Reads the graph only."""
        for target in _WRITES:
            for node in graph.find_nodes(op="call_function", target=target):
                yield from _choice(node)

    def apply(self, graph: fx.Graph, choice: Choice) -> None:
        """Replace a write by a choice, copied into the tensor where that was changed in place."""
        node, mask = choice.node, only_mask(choice.node)
        written, _, value, *rest = node.args
        assert isinstance(written, fx.Node)
        assert isinstance(value, fx.Node)
        assert mask is not None
        rank = written.meta["val"].dim()

        def insert(target: Any, *args: Any) -> fx.Node:
            return call(graph, target, *args, origin=node)

        with graph.inserting_before(node):
            if mask.meta["val"].dtype != torch.bool:
                mask = insert(aten.ne.Scalar, mask, 0)
            for _ in range(rank - choice.dim - mask.meta["val"].dim()):
                mask = insert(aten.unsqueeze.default, mask, -1)
            if choice.size != value.meta["val"].shape:
                value = insert(aten.view.default, value, list(choice.size))
            if any(rest) or node.kwargs.get("accumulate"):
                value = insert(aten.add.Tensor, written, value)
            result = insert(aten.where.self, mask, value, written)
            if node.target is aten.index_put_.default:
                result = insert(aten.copy_.default, written, result)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
