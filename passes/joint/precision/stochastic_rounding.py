"""Round results in half precision up or down at random, without bias.

Before   %y: f16[n] = aten.add(%a, %b)
After    %y_f32: f32[n] = aten.add(%a_f32, %b_f32)
         %r: i32[n] = 13 random bits;  %y: f16[n] = the upper bits of %y_f32 + %r
Keeps    stages and source lines; values that a half holds exactly. Every other result becomes one
         of the two halves around it, the nearer one with the greater probability, so that its
         expectation is exact. Views and copies round nothing; partial sums in half precision
         and sums in accumulators are rounded to the nearest.
Source   PopTorch user guide, "poptorch.options._PrecisionOptions.enableStochasticRounding".
"""

from dataclasses import dataclass
from operator import getitem
from typing import ClassVar

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.ops.graph_queries import is_view
from ipu_dynamo.ops.half_precision import DROPPED_BITS, SMALLEST_NORMAL, STEP
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.ops.recurrent.pairs import RECURRENT
from ipu_dynamo.passes.graph.builder import become
from ipu_dynamo.passes.graph.upcast import InFloat, is_half
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import Drawing
from ipu_dynamo.passes.joint.random_numbers.counter_random import key_input
from ipu_dynamo.passes.levels import Level

aten = torch.ops.aten
_ROUNDED = "ipu.rounded"  # key of the meta of conversions that round nothing any more
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


@dataclass(frozen=True)
class StochasticRounding:
    """The pass. `enabled`: whether to do it at all."""

    name: ClassVar[str] = "StochasticRounding"
    level: ClassVar[Level] = "joint"

    enabled: bool

    def __call__(self, capture: Capture) -> bool:
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
            capture.graph.recompile()
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
        and node.target not in (*_COPIES, aten._to_copy.default)
        and (is_half(node) or any(is_half(part) for part in node.users if part.target is getitem))
        and any(is_half(n) for n in node.all_input_nodes)
    ]


def rounding(graph: fx.Graph) -> list[fx.Node]:
    """The conversions of wider numbers to halves. Reads the graph only."""
    return [
        node
        for node in graph.find_nodes(op="call_function", target=aten._to_copy.default)
        if is_half(node) and _ROUNDED not in node.meta and _is_wide(node.args[0])
    ]


def _is_wide(source: fx.Node) -> bool:
    value: Tensor = source.meta["val"]
    return value.dtype in (torch.float32, torch.float64)


def _round(d: Drawing) -> None:
    """Turn the conversion `d.node` into one of a number that a half holds exactly."""
    source = d.node.args[0]
    assert isinstance(source, fx.Node)
    x = source
    if x.meta["val"].dtype != torch.float32:
        x = d.op(aten._to_copy.default, x, dtype=torch.float32)
    bits = d.op(
        aten.bitwise_and.Scalar, d.bits(tuple(x.meta["val"].shape)), (1 << DROPPED_BITS) - 1
    )
    # large numbers: carry the random bits into the fraction, then cut it
    whole = d.op(aten.view.dtype, _dense(d, x), torch.int32)
    cut = d.op(aten.bitwise_and.Scalar, d.op(aten.add.Tensor, whole, bits), -(1 << DROPPED_BITS))
    large = d.op(aten.view.dtype, cut, torch.float32)
    # small numbers: a multiple of the step, the next one with the probability of the rest
    chance = d.op(aten._to_copy.default, bits, dtype=torch.float32)
    chance = d.op(aten.mul.Tensor, chance, 2.0**-DROPPED_BITS)
    steps = d.op(aten.add.Tensor, d.op(aten.mul.Tensor, x, 1 / STEP), chance)
    small = d.op(aten.mul.Tensor, d.op(aten.floor.default, steps), STEP)
    size = d.op(aten.abs.default, x)
    chosen = d.op(aten.where.self, d.op(aten.lt.Scalar, size, SMALLEST_NORMAL), small, large)
    finite = d.op(aten.lt.Scalar, size, float("inf"))
    result = d.op(aten.where.self, finite, chosen, x, name=f"{d.node.name}_rounded")
    become(d.node, aten._to_copy.default, result, dtype=torch.float16)
    d.node.meta[_ROUNDED] = True


def _dense(d: Drawing, x: fx.Node) -> fx.Node:
    """`x`, with elements that lie side by side, as a view of another dtype wants them."""
    value: Tensor = x.meta["val"]
    return x if value.is_contiguous() else d.op(aten.clone.default, x)
