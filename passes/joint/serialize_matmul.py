"""Serialise marked matrix products, to trade time for peak memory.

Before   %y = ipu.serialized_matmul(%x: f32[m,k], %w: f32[k,p], "output_channels", 2, False)
After    %a = aten.mm(%x, %w[:, :p/2])
         %b = aten.mm(%x, %w[:, p/2:])
         %a  with meta["ipu.serial_step"] = "1/2"
         %b  with meta["ipu.serial_step"] = "2/2"
         %y = aten.cat([%a, %b], -1)
Keeps    shapes, dtypes, stages, source lines; values up to the rounding of a blocked product. Parts
         are computed, and added up, in the order of their index.
Source   PopTorch user guide, "poptorch.serializedMatMul".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.marks.serialized import serialized_matmul_op
from ipu_dynamo.ops.parts import parts
from ipu_dynamo.passes.graph.builder import call, keep_plan, replace
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.program.text.graph_text import SERIAL_STEP

HALF = (torch.float16, torch.bfloat16)
_SPLIT = {  # mode: the split dimension of lhs, of rhs, of the product; None: taken whole, or a sum
    "input_channels": (-2, None, -2),
    "reducing_dim": (-1, -2, None),
    "output_channels": (None, -1, -1),
}


@dataclass(frozen=True, slots=True)
class MatmulSplit:
    """The decision to compute `node` in parts `bounds` of the dimension that its mode splits."""

    node: fx.Node
    bounds: tuple[tuple[int, int], ...]


def arguments(node: fx.Node) -> tuple[fx.Node, fx.Node, str, int, bool]:
    """Left and right factor, mode, number of parts, and `keep_precision` of a marked product."""
    return cast(tuple[fx.Node, fx.Node, str, int, bool], node.args)


def split_size(node: fx.Node) -> int:
    """The size of the dimension that a marked product splits.

    Raises:
        CompileError: there are more parts than that.
    """
    lhs, rhs, mode, factor, _ = arguments(node)
    left, right, _ = _SPLIT[mode]
    source, dim = (rhs, right) if left is None else (lhs, left)
    size = source.meta["val"].shape[dim]
    if factor > size:
        raise CompileError(
            f"cannot serialise a dimension of {size} in {factor} parts (mode {mode})",
            node=node,
            hint=f"choose a factor from 1 to {size}, or another mode",
        )
    return int(size)


def _slice(
    graph: fx.Graph,
    source: fx.Node,
    dim: int | None,
    start: int,
    stop: int,
    *,
    wide: bool,
    origin: fx.Node,
) -> fx.Node:
    """One part of a factor, in float32 if `wide`."""
    if dim is not None and stop - start < source.meta["val"].shape[dim]:
        dim += source.meta["val"].dim()
        source = call(graph, aten.slice.Tensor, source, dim, start, stop, origin=origin)
    if wide:
        source = call(graph, aten._to_copy.default, source, dtype=torch.float32, origin=origin)
    return source


def _joined(
    graph: fx.Graph, products: Sequence[fx.Node], dim: int | None, *, origin: fx.Node
) -> fx.Node:
    if len(products) == 1:
        return products[0]
    assert dim is not None, "parts of a sum are added up one by one"
    return call(graph, aten.cat.default, list(products), dim, origin=origin)


class SerializeMatmul(GraphPass):
    """The pass."""

    level = "joint"
    acts_on = (serialized_matmul_op,)

    def plan(self, graph: fx.Graph) -> tuple[MatmulSplit, ...]:
        """Decide how to split each marked product. Reads the graph, changes nothing."""
        splits = []
        for node in graph.find_nodes(op="call_function", target=serialized_matmul_op):
            *_, factor, _ = arguments(node)
            splits.append(MatmulSplit(node, parts(split_size(node), factor)))
        return tuple(splits)

    def apply(self, graph: fx.Graph, split: MatmulSplit) -> None:
        """Replace `split.node` by a product for each part, and their concatenation or sum."""
        node = split.node
        lhs, rhs, mode, _, keep_precision = arguments(node)
        left, right, joined = _SPLIT[mode]
        wide = keep_precision and joined is None and node.meta["val"].dtype in HALF
        products, parts_of = list[fx.Node](), list[fx.Node]()
        with graph.inserting_before(node):
            for number, (start, stop) in enumerate(split.bounds, 1):
                a = _slice(graph, lhs, left, start, stop, wide=wide, origin=node)
                b = _slice(graph, rhs, right, start, stop, wide=wide, origin=node)
                kind = aten.mm.default if node.meta["val"].dim() == 2 else aten.bmm.default
                product = call(graph, kind, a, b, origin=node)
                parts_of.append(product)
                if len(split.bounds) > 1:
                    product.meta[SERIAL_STEP] = f"{number}/{len(split.bounds)}"
                if joined is None and products:
                    product = call(graph, aten.add.Tensor, products.pop(), product, origin=node)
                products.append(product)
            whole = _joined(graph, products, joined, origin=node)
            if wide:
                dtype = node.meta["val"].dtype
                whole = call(graph, aten._to_copy.default, whole, dtype=dtype, origin=node)
        keep_plan(node, *parts_of)
        replace(node, whole)
        graph.erase_node(node)
