"""Begin the backward pass with a loss scale that may change, and count large gradients.

With     variable=True, start=1.0, automatic=AutomaticLossScaling()
Before   %s: f16[] = aten.full([], 8.0, dtype=torch.float16)  with meta["ipu.start"] = True
         %g: f16[m,n] = aten.mm(aten.expand(%s, [m, k]), %x: f16[k,n])
After    %f: f32[] = loss_scale(".loss_scale")
         %s: f16[] = aten._to_copy(aten.mul(%f, 1.0), dtype=torch.float16)
         %g = aten.mm(aten.expand(%s, [m, k]), %x)
         %c: i64[] = aten.sum(aten.le(aten.abs(%g), 8188.0))
         return (%g, count("g", %c))
         capture.loss_scale = LossScale(".loss_scale", torch.float16, m * n)
Keeps    all values, with the same loss scale; stages and source lines. A nan is large.
Source   PopTorch user guide, "poptorch.options._TrainingOptions.setAutomaticLossScaling".
"""

from operator import getitem

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import (
    LOSS_SCALE,
    START,
    Joint,
    LossScale,
    OutputRole,
    Placeholder,
)
from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import depending_on, is_view
from ipu_dynamo.options import AutomaticLossScaling
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.builder import become, call
from ipu_dynamo.passes.graph.upcast import is_half
from ipu_dynamo.passes.joint.precision.upcast_half_matmuls import PRODUCTS
from ipu_dynamo.passes.kit import GraphPass

LARGEST_HALF = 65504.0
_COPIES = {
    aten.alias.default,
    aten.clone.default,
    aten.copy.default,
    aten.expand_copy.default,
    aten.lift_fresh_copy.default,
}


class NothingToWatch(CompileError):
    """Automatic loss scaling is on, and no gradient is in half precision."""


class ScaleLoss(GraphPass):
    """The pass.

    Args:
        variable: the loss scale may change.
        start: first gradient of the backward pass at a loss scale of 1.
        automatic: the numbers to count for the next loss scale; None: count nothing.
    """

    level = "joint"
    needed = "the factor on the loss would not be in force"

    variable: bool
    start: float
    automatic: AutomaticLossScaling | None = None

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return self.variable

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        begins = [node for node in graph.nodes if node.meta.get(START, False)]
        if not (self.variable and begins):
            return False
        (begin,) = begins
        del begin.meta[START]
        watched = 0
        if self.automatic is not None:
            watched = _count(capture, plan(graph, begin, self.automatic), self.automatic.edge)
        scale = _scale_input(capture, begin)
        dtype = begin.meta["val"].dtype
        capture.loss_scale = LossScale(capture.roles()[scale].name, dtype, watched)
        if dtype == torch.float32:
            become(begin, aten.mul.Tensor, scale, self.start)
        else:
            with graph.inserting_before(begin):
                wide = call(graph, aten.mul.Tensor, scale, self.start, origin=begin)
            become(begin, aten._to_copy.default, wide, dtype=dtype)
        return True


def plan(graph: fx.Graph, begin: fx.Node, automatic: AutomaticLossScaling) -> list[fx.Node]:
    """The gradients to watch, in the order of computation. Reads the graph only.

    Raises:
        NothingToWatch: there are none.
    """
    reached = depending_on([begin])
    products = automatic.watch == "products"
    starts = [
        node
        for node in graph.nodes
        if node in reached - {begin}
        and is_half(node)
        and not _only_copies(node)
        and (_maker(node).target in PRODUCTS or not products)
    ]
    if not starts:
        of = "a product in float16" if products else "float16"
        raise NothingToWatch(
            f"automatic loss scaling finds no gradient of {of} to watch",
            node=begin,
            hint="compute in float16 (model.half()), or leave automatic loss scaling out",
        )
    return starts


def _only_copies(node: fx.Node) -> bool:
    """Whether a gradient has only elements of another half one."""
    if is_view(node) or node.target in _COPIES:
        return True
    return node.target is aten._to_copy.default and is_half(node.all_input_nodes[0])


def _maker(node: fx.Node) -> fx.Node:
    """Return the operator that computes a value, alone or among several results."""
    return node.all_input_nodes[0] if node.target is getitem else node


def _count(capture: Joint, gradients: list[fx.Node], edge: float) -> int:
    """Output the number of elements that are not large, for each of `gradients`.

    Returns:
        The number of all elements.
    """
    graph = capture.graph.graph
    limit = _half_at_most(edge * LARGEST_HALF)
    counts = []
    for gradient in gradients:
        with graph.inserting_after(gradient):
            size = call(graph, aten.abs.default, gradient, origin=gradient)
        with graph.inserting_after(size):
            within = call(graph, aten.le.Scalar, size, limit, origin=gradient)
        with graph.inserting_after(within):
            counts.append(call(graph, aten.sum.default, within, origin=gradient))
    roles = [OutputRole("count", gradient.name) for gradient in gradients]
    capture.set_returned([*capture.returned, *counts], [*capture.outputs, *roles])
    return sum(gradient.meta["val"].numel() for gradient in gradients)


def _half_at_most(value: float) -> float:
    """Return the largest half that is at most `value`: every engine compares halves with it."""
    half = torch.tensor(value, dtype=torch.float64).half()
    if half.double().item() > value:
        half = torch.nextafter(half, half.new_zeros(()))
    return float(half)


def _scale_input(capture: Joint, begin: fx.Node) -> fx.Node:
    """A new input for the loss scale, after the other placeholders."""
    nodes = capture.placeholder_nodes
    with capture.graph.graph.inserting_after(nodes[-1]):
        node: fx.Node = capture.graph.graph.placeholder("loss_scale")
    value: Tensor = begin.meta["val"]
    with fake_mode_of([value]):
        node.meta["val"] = torch.empty((), dtype=torch.float32, device=value.device)
    capture.placeholders = (*capture.placeholders, Placeholder(LOSS_SCALE, "loss_scale"))
    return node
