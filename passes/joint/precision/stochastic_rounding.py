"""Round results in half precision up or down at random, without bias.

With     enabled=True
Before   %y = aten.exp(%x: f16[n])
After    %k: i32[2] = random_key(".random_key")
         %e = aten.exp(aten._to_copy(%x, dtype=torch.float32))  with meta["ipu.machine"] = "f16"
         %k  with meta["ipu.machine"] = "nothing"
         %a = aten.add(%k[0], offset(0, 8 << 20))  with meta["ipu.machine"] = "nothing"
         %b = aten.add(%k[1], offset(1, 8 << 20))  with meta["ipu.machine"] = "nothing"
         %a  with meta["ipu.stream"] = (0, 8 << 20)
         %b  with meta["ipu.stream"] = (1, 8 << 20)
         %y: f16[n] = ipu.round_stochastically(%e, %a, %b)
Keeps    stages and source lines; values that a half holds exactly, but that -0.0 becomes 0.0.
         Every other result becomes one of the two halves around it, the nearer one with the
         greater probability. From 2**-14, the smallest normal half, the expectation is exact.
         Below, the chance of the upper half is rounded down to a multiple of 2**-13. So the
         expectation is up to 2**-13 of a step of 2**-24 too low, and a positive number below
         2**-37 is always 0. Numbers between the largest half, 65504, and 65536 become one of it and
         infinity. Views, copies and memory without a value are not rounded. Partial sums in half
         precision and sums in accumulators are rounded to the nearest.
Source   PopTorch user guide, "poptorch.options._PrecisionOptions.enableStochasticRounding".
"""

from operator import getitem

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import UNFILLED, is_view
from ipu_dynamo.ops.precision.stochastic_rounding import round_stochastically_op
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.ops.recurrent.pairs import RECURRENT
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.builder import become
from ipu_dynamo.passes.graph.upcast import InFloat, is_half
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import Drawing
from ipu_dynamo.passes.joint.random_numbers.counter_random import key_input
from ipu_dynamo.passes.kit import GraphPass

_FIRST_STREAM = 1 << 20  # apart from the random operators of the model
_COPIES = frozenset(  # give elements that they were given, perhaps with another sign
    {
        aten.abs.default,
        aten.alias.default,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.copy.default,
        aten.embedding.default,
        aten.flip.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.masked_fill.Scalar,
        aten.max_pool2d_with_indices.default,
        aten.neg.default,
        aten.relu.default,
        aten.repeat.default,
        aten.select_backward.default,
        aten.slice_backward.default,
        aten.stack.default,
        aten.threshold_backward.default,
        aten.where.self,
    }
)


class StochasticRounding(GraphPass):
    """The pass. `enabled`: whether to do it at all."""

    level = "joint"

    enabled: bool

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return self.enabled and contents.halves

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        narrow = computing_in_half(graph) if self.enabled else []
        rewrite = InFloat.of(capture)
        for node in narrow:
            rewrite.rewrite(node)
        conversions = rounding(graph) if self.enabled else []
        key = key_input(capture) if conversions else None
        for number, node in enumerate(conversions):
            assert key is not None
            with graph.inserting_before(node):
                _round(Drawing(graph, key, node, _FIRST_STREAM + number))
        if narrow or conversions:
            graph.eliminate_dead_code()
        return bool(narrow or conversions)


def computing_in_half(graph: fx.Graph) -> list[fx.Node]:
    """The operators whose results are rounded to half on the way. Reads the graph only."""
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, OpOverload)
        and (node.target.namespace == "aten" or node.target in RECURRENT)
        and node.all_input_nodes
        and not is_view(node)
        and node.target not in _COPIES | UNFILLED | {aten._to_copy.default}
        and (is_half(node) or any(is_half(part) for part in node.users if part.target is getitem))
        and any(is_half(n) for n in node.all_input_nodes)
    ]


def rounding(graph: fx.Graph) -> list[fx.Node]:
    """The conversions of wider numbers to halves. Reads the graph only."""
    return [
        node
        for node in graph.find_nodes(op="call_function", target=aten._to_copy.default)
        if is_half(node) and _is_wide(node.args[0])
    ]


def _is_wide(source: fx.Node) -> bool:
    value: Tensor = source.meta["val"]
    return value.dtype in (torch.float32, torch.float64)


def _round(d: Drawing) -> None:
    """Turn the conversion `d.node` into one that rounds at random."""
    source = d.node.args[0]
    assert isinstance(source, fx.Node)
    become(d.node, round_stochastically_op, source, *d.words())
