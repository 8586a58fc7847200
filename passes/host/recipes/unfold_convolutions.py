"""Unfold small convolutions into matmuls of patches, where that is faster here.

Before   %y: f32[n,o,h,w] = aten.convolution(%x, %w, %b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
After    %p: f32[c*kh*kw,n*h*w] = aten.clone(%seen)   # patches of %x
         %m: f32[o,n*h*w] = aten.mm(%flat, %p)
         %y: f32[n,o,h,w] = aten.clone(%images)
Keeps    shapes, layouts, source lines; values but for the order of the sums.
Source   Chellapilla, Puri and Simard, High performance convolutional neural networks (2006).

Large ones stay with the library that PyTorch calls: it is the faster one where arithmetic counts.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.host.recipes.recipe_pass import RecipePass, Rewritten
from ipu_dynamo.passes.host.recipes.write_operators import written
from ipu_dynamo.program import Decision, Function, HostProgram, make_function
from ipu_dynamo.program.ir.layout import dense_strides
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.tune.convolution_shape import ConvolutionShape
from ipu_dynamo.tune.convolution_times import convolution_times
from ipu_dynamo.tune.costs import (
    LARGE_CONVOLUTION,
    MOST_PATCHES,
    MOST_PLACES,
    WORTH_CHANGING,
)
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.tune.matmul_choice import MatmulChoice, matmul_choice

_PLAIN = ([1, 1], False, [0, 0], 1)  # dilation, transposed, padding of the output, groups
Times = Callable[[ConvolutionShape], Mapping[str, float] | None]


@dataclass(frozen=True, slots=True)
class ConvolutionUse:
    """A convolution of a program, whether matmuls compute it, and the seconds of each way: of
    PyTorch's own code as measured, of matmuls as estimated."""

    of: ConvolutionShape
    matmuls: bool
    seconds: Mapping[str, float]


def plan(
    graph: fx.Graph,
    times: Times = convolution_times,
    *,
    choice: MatmulChoice | None = None,
    forced: bool | None = None,
) -> dict[fx.Node, ConvolutionUse]:
    """Decide how the small convolutions of a graph are computed. Reads the graph only.

    Args:
        choice: of matmuls; where one library is forced, it computes convolutions, too. None: the
            one in force.
        forced: matmuls compute all convolutions, or none, regardless of the time.
    """
    if forced is None and (choice or matmul_choice()).forced is not None:
        return {}
    uses = {}
    for node in graph.nodes:
        of = _shape_of(node)
        if of is None:
            continue
        if forced is not None:
            uses[node] = ConvolutionUse(of, forced, {})
        elif seconds := times(of):
            matmuls = seconds["matmuls"] * WORTH_CHANGING <= seconds["torch"]
            uses[node] = ConvolutionUse(of, matmuls, seconds)
    return uses


def uses_of(functions: Iterable[Function]) -> tuple[ConvolutionUse, ...]:
    """The small convolutions of functions that Inductor compiles."""
    return tuple(use for function in functions for use in plan(function.graph.graph).values())


def _shape_of(node: fx.Node) -> ConvolutionShape | None:
    """Return the shape of a small convolution that matmuls can compute; None for others."""
    mask: tuple[bool, ...] = ()
    if node.target is aten.convolution.default:
        x, weight, bias, stride, padding, *rest = node.args
    elif node.target is aten.convolution_backward.default:
        _, x, weight, _, stride, padding, *rest, output_mask = node.args
        bias, mask = None, tuple(output_mask)  # type: ignore[arg-type]
        if not all(user.target is getitem and mask[user.args[1]] for user in node.users):  # type: ignore[index]
            return None
    else:
        return None
    values = [source.meta["val"] for source in node.all_input_nodes]
    plain = all(v.dtype == torch.float32 and v.device.type == "cpu" for v in values)
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    images, kernels = x.meta["val"], weight.meta["val"]
    value = node.meta["val"]
    results = [value] if isinstance(value, Tensor) else [v for v in value if v is not None]
    dense = all(map(is_dense, (images, kernels, *results)))
    if not plain or not dense or images.dim() != 4 or tuple(rest) != _PLAIN:
        return None
    of = ConvolutionShape(
        tuple(images.shape),
        tuple(kernels.shape),
        tuple(stride),  # type: ignore[arg-type]
        tuple(padding),  # type: ignore[arg-type]
        mask,
        bias is not None,
    )
    return of if _is_small(of) else None


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has the strides of a new one; sizes of 1 hide it from `is_contiguous`."""
    return tensor.stride() == dense_strides(tensor.shape)


def _is_small(of: ConvolutionShape) -> bool:
    operations = 2 * of.patches * of.weight[0]
    if of.mask and of.mask[0] and (of.stride != (1, 1) or prod(of.weight[2:]) > MOST_PLACES):
        return False
    return 0 < operations < LARGE_CONVOLUTION and of.patches <= MOST_PATCHES


def apply(function: Function, chosen: Collection[fx.Node]) -> Function:
    """`function` with convolutions computed by matmuls of patches."""
    graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
    gradients: dict[fx.Node, list[fx.Node | None]] = {}
    for node in function.graph.graph.nodes:
        if node in chosen and node.target is aten.convolution.default:
            (result,) = _forward(graph, node, of)
            assert result is not None
            of[node] = result
        elif node in chosen:
            gradients[node] = _backward(graph, node, of)
        elif node.target is getitem and node.args[0] in gradients:
            of[node] = gradients[node.args[0]][node.args[1]]
        else:
            of[node] = graph.node_copy(node, of.__getitem__)
    return make_function(function.name, fx.GraphModule(function.graph, graph))


def _forward(graph: fx.Graph, node: fx.Node, of: Mapping[fx.Node, fx.Node]) -> list[fx.Node | None]:
    from ipu_dynamo.passes.host.recipes.convolution_matmuls import (
        convolution,  # imports Inductor: a second
    )

    arguments: Any = node.args
    x, weight, bias, stride, padding, *_ = arguments

    def plain(x: Tensor, weight: Tensor) -> list[Tensor | None]:
        return [convolution(x, weight, None, stride, padding)]

    def with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor | None]:
        return [convolution(x, weight, bias, stride, padding)]

    if bias is None:
        return written(graph, node, plain, [x, weight], of)
    return written(graph, node, with_bias, [x, weight, bias], of)


def _backward(
    graph: fx.Graph, node: fx.Node, of: Mapping[fx.Node, fx.Node]
) -> list[fx.Node | None]:
    from ipu_dynamo.passes.host.recipes.convolution_matmuls import gradients

    arguments: Any = node.args
    gradient, x, weight, _, stride, padding, *_, mask = arguments
    read = {user.args[1] for user in node.users}
    mask = [asked and index in read for index, asked in enumerate(mask)]

    def compute(gradient: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
        return gradients(gradient, x, weight, stride, padding, mask)

    return written(graph, node, compute, [gradient, x, weight], of)


class UnfoldConvolutions(RecipePass):
    """The pass.

    Args:
        figures: to decide by; None: those of this machine.
        forced: whether to unfold all convolutions where possible, regardless of the gain.
    """

    acts_on = (aten.convolution.default, aten.convolution_backward.default)
    choices = (True, False)

    figures: Figures | None = None
    forced: bool | None = None

    def rewrite(self, recipe: FunctionRecipe, host: HostProgram | None) -> Rewritten:
        function, figures = recipe.lowered, self.figures
        times = convolution_times if figures is None else figures.of_convolution
        choice = None if figures is None else figures.choice()
        uses = plan(function.graph.graph, times, choice=choice, forced=self.forced)
        decisions = [
            Decision(
                self.name,
                "matmul of patches" if use.matmuls else "torch",
                "it is forced" if self.forced is not None else "",
                recipe.function.name,
                of=str(use.of),
                seconds=use.seconds,
            )
            for use in uses.values()
        ]
        chosen = {node for node, use in uses.items() if use.matmuls}
        return replace(recipe, lowered=apply(function, chosen)) if chosen else recipe, decisions
