"""Multiply halves in float32 and round the result once, on processors without half arithmetic.

Before   %y: f16[m,n] = aten.mm(%a, %b)                    f16[m,k], f16[k,n]
After    %p: f32[m,n] = aten.mm(%a_, %b_)                  %a_ and %b_ are %a and %b in float32
         %y: f16[m,n] = aten._to_copy(%p, dtype=float16)
Keeps    stages and source lines; results, but for the order of the sum: both forms add in float32
         and round once. Other devices than the CPU multiply halves themselves.
Source   a product of two halves is exact in float32. PyTorch 2.13 multiplies halves on the CPU at a
         tenth of the speed of float32, in the shapes of the backward pass at a thirtieth.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Capture
from ipu_dynamo.passes.insert import become, call

aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        aten.addbmm.default,
        aten.addmm.default,
        aten.addmv.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.dot.default,
        aten.mm.default,
        aten.mv.default,
    }
)


@dataclass
class _InFloat:
    """The rewrite of one graph. Invariant: `wide` has one conversion of a value for each stage
    and direction, so that what travels between stages stays half as large."""

    graph: fx.Graph
    names: Mapping[fx.Node, str]
    wide: dict[tuple[fx.Node, Any, Any], fx.Node] = field(default_factory=dict)

    def rewrite(self, product: fx.Node) -> None:
        with self.graph.inserting_before(product):
            args = map_arg(product.args, lambda n: self.widened(n, product))
            name = f"{product.name}_f32"
            wide = call(
                self.graph, product.target, *args, origin=product, name=name, **product.kwargs
            )
        if isinstance(wide.meta["val"], Tensor):
            become(product, aten._to_copy.default, wide, dtype=torch.float16)
            return
        for part in list(product.users):
            assert part.target is getitem, "only parts of several results can be read"
            with self.graph.inserting_before(part):
                name = f"{part.name}_f32"
                value = call(self.graph, getitem, wide, part.args[1], origin=part, name=name)
            become(part, aten._to_copy.default, value, dtype=torch.float16)
        self.graph.erase_node(product)

    def widened(self, source: fx.Node, product: fx.Node) -> fx.Node:
        if not is_half(source):
            return source
        key = source, product.meta.get(STAGE), product.meta.get(BACKWARD)
        if key not in self.wide:
            self.wide[key] = call(
                self.graph,
                aten._to_copy.default,
                source,
                dtype=torch.float32,
                origin=product,
                name=f"{self.names.get(source, source.name)}_f32",
            )
        return self.wide[key]


def plan(graph: fx.Graph) -> list[fx.Node]:
    """The products of halves on the CPU. Reads the graph only."""
    return [
        node
        for node in graph.nodes
        if node.target in PRODUCTS and any(map(is_half, node.all_input_nodes))
    ]


def float_products(capture: Capture) -> bool:
    """The pass."""
    products = plan(capture.graph.graph)
    names = {node: role.name for node, role in capture.roles().items()}
    rewrite = _InFloat(capture.graph.graph, names)
    for product in products:
        rewrite.rewrite(product)
    if products:
        capture.graph.recompile()
    return bool(products)


def is_half(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dtype == torch.float16 and value.device.type == "cpu"
