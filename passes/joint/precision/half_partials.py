"""Keep the partial sums of half products in half precision, chunk by chunk.

With     matmuls=True
Before   %y = aten.addmm(%b: f16[n], %x: f16[m,k], %w: f16[k,n])
After    %p = ipu.half_partials_matmul(%x, %w, 64)
         %y = aten.add(%p, %b)
Keeps    stages, source lines, shapes, groups; products of float32. Values change, as is asked:
         `ops/precision/half_partial_sums.py` says how, and how far they can be from the exact
         ones. Recurrent layers keep partial sums of float32: the options speak of matmuls and
         convolutions.
Source   PopTorch user guide, "poptorch.options._PrecisionOptions.setPartialsType".
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.precision import half_partial_sums as ops
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.builder import become, call, keep_plan
from ipu_dynamo.passes.joint.schedule_convolution_groups import PARTIALS
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.program.machine_marks import run_nothing


class HalfPartials(GraphPass):
    """The pass.

    Args:
        chunk: elements of the reduction whose products are summed in float32.
        matmuls, convolutions: the kinds of products to rewrite; a convolution in a group may have
            its own partials.
    """

    level = "joint"

    chunk: int
    matmuls: bool
    convolutions: bool

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return contents.halves and (self.matmuls or self.convolutions or PARTIALS in contents.marks)

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        products = plan(graph, matmuls=self.matmuls, convolutions=self.convolutions)
        for node in products:
            with graph.inserting_before(node):
                _REWRITES[node.target](_Product(graph, node, self.chunk))
        if products:
            graph.eliminate_dead_code()
        return bool(products)


def plan(graph: fx.Graph, *, matmuls: bool, convolutions: bool) -> list[fx.Node]:
    """The products of two halves that get half partials. Reads the graph only."""
    precisions = dict.fromkeys(_MATMULS, matmuls) | dict.fromkeys(_CONVOLUTIONS, convolutions)
    partials = {True: "half", False: "float"}
    return [
        node
        for node in graph.nodes
        if node.target in _REWRITES
        and node.meta.get(PARTIALS, partials[precisions[node.target]]) == "half"
        and node.all_input_nodes[-1].meta["val"].dtype == torch.float16
    ]


@dataclass(frozen=True)
class _Product:
    """One product and the operators that take its place."""

    graph: fx.Graph
    node: fx.Node
    chunk: int

    def op(self, target: Any, *args: Any) -> fx.Node:
        return call(self.graph, target, *args, origin=self.node)

    def matmul(self, a: Any, b: Any) -> fx.Node:
        """Insert the product, which is planned as the node was."""
        product = self.op(ops.matmul, a, b, self.chunk)
        keep_plan(self.node, product)
        return product

    def become(self, target: Any, *args: Any) -> None:
        become(self.node, target, *args)

    @property
    def args(self) -> tuple[Any, ...]:
        return self.node.args

    def argument(self, position: int, name: str, default: Any) -> Any:
        args, kwargs = self.node.args, self.node.kwargs
        return args[position] if position < len(args) else kwargs.get(name, default)


def _matmul(p: _Product) -> None:
    p.become(ops.matmul, *p.args[:2], p.chunk)


def _added(p: _Product, product: fx.Node) -> None:
    """beta * bias + alpha * product."""
    bias, beta, alpha = p.args[0], p.argument(3, "beta", 1), p.argument(4, "alpha", 1)
    if alpha != 1:
        product = p.op(aten.mul.Tensor, product, alpha)
    if beta == 0:  # the bias counts for nothing, nan or not
        p.become(aten.expand.default, product, list(p.node.meta["val"].shape))
        return
    if beta != 1:
        bias = p.op(aten.mul.Tensor, bias, beta)
    p.become(aten.add.Tensor, product, bias)


def _added_matmul(p: _Product) -> None:
    _added(p, p.matmul(*p.args[1:3]))


def _added_matrix_by_vector(p: _Product) -> None:
    matrix, vector = p.args[1:3]
    column = p.op(aten.unsqueeze.default, vector, 1)
    _added(p, p.op(aten.squeeze.dim, p.matmul(matrix, column), 1))


def _added_sum_of_matmuls(p: _Product) -> None:
    """Write one product that reduces over the batch, too."""
    a, b = p.args[1:3]
    count, rows, depth = a.meta["val"].shape
    side = p.op(aten.permute.default, a, [1, 0, 2])
    left = p.op(aten.reshape.default, side, [rows, count * depth])
    right = p.op(aten.reshape.default, b, [count * depth, b.meta["val"].shape[2]])
    _added(p, p.matmul(left, right))


def _matrix_by_vector(p: _Product) -> None:
    a, b = p.args[:2]
    column = p.op(aten.unsqueeze.default, b, 1)
    p.become(aten.squeeze.dim, p.matmul(a, column), 1)


def _vector_by_vector(p: _Product) -> None:
    a, b = p.args[:2]
    row, column = p.op(aten.unsqueeze.default, a, 0), p.op(aten.unsqueeze.default, b, 1)
    p.become(aten.view.default, p.matmul(row, column), [])


def _convolution(p: _Product) -> None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = p.args
    dims = len(weight.meta["val"].shape) - 2
    geometry = (*_spread(dims, stride, padding, dilation), groups, p.chunk)
    if transposed:
        shape = list(p.node.meta["val"].shape)
        product = p.op(ops.conv_input, shape, x, weight, *geometry)
    else:
        product = p.op(ops.conv, x, weight, *geometry)
    keep_plan(p.node, product)
    if bias is None:
        run_nothing(p.node)
        p.become(aten.clone.default, product)
        return
    size = bias.meta["val"].shape[0]
    p.become(aten.add.Tensor, product, p.op(aten.view.default, bias, [size, *[1] * dims]))


def _convolution_backward(p: _Product) -> None:
    gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = p.args
    dims = len(weight.meta["val"].shape) - 2
    geometry = (*_spread(dims, stride, padding, dilation), groups, p.chunk)
    shape, kernel = list(x.meta["val"].shape), list(weight.meta["val"].shape)
    keep_plan(p.node, *[part for part in p.node.users if part.args[1] != 2])
    for part in list(p.node.users):
        assert part.target is getitem, "only parts of several results can be read"
        which = part.args[1]
        with p.graph.inserting_before(part):
            if which == 2:
                become(part, aten.sum.dim_IntList, gradient, [0, *range(2, dims + 2)])
            elif which == 1:
                pair = (x, gradient) if transposed else (gradient, x)
                become(part, ops.conv_weight, kernel, *pair, *geometry)
            elif transposed:
                become(part, ops.conv, gradient, weight, *geometry)
            else:
                become(part, ops.conv_input, shape, gradient, weight, *geometry)


def _spread(dims: int, *sizes: Any) -> list[list[int]]:
    """Return a size for every dimension; a single size is repeated for all."""
    return [list(s) * dims if len(s) == 1 else list(s) for s in sizes]


_Rewrite = Callable[[_Product], None]
_MATMULS: dict[Any, _Rewrite] = {
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.addmm.default: _added_matmul,
    aten.baddbmm.default: _added_matmul,
    aten.addmv.default: _added_matrix_by_vector,
    aten.addbmm.default: _added_sum_of_matmuls,
    aten.mv.default: _matrix_by_vector,
    aten.dot.default: _vector_by_vector,
}
_CONVOLUTIONS: dict[Any, _Rewrite] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
_REWRITES = _MATMULS | _CONVOLUTIONS
