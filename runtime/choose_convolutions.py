"""Let each small convolution of a stage be computed by the code that is faster here.

Before   %y: f32[n,o,h,w] = aten.convolution(%x, %w, %b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
After    %y: f32[n,o,h,w] = ipu.native_convolution(%x, %w, %b, [1, 1], [0, 0])
Keeps    shapes, layouts, source lines; values but for the order of the sums.

Large ones stay with oneDNN: it is the faster one where the arithmetic counts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from ipu_dynamo.program import Function, make_function
from ipu_dynamo.runtime.convolution_times import ConvolutionShape, convolution_times
from ipu_dynamo.runtime.native_convolution import (
    is_dense,
    native_convolution,
    native_convolution_backward,
)
from ipu_dynamo.runtime.product_choice import product_choice

aten = torch.ops.aten
_LARGE = 50_000_000  # operations (a multiplication and an addition are two)
_FASTER = 1.05  # PyTorch's choice stays where the other gains less
_PLAIN = ([1, 1], False, [0, 0], 1)  # dilation, transposed, padding of the output, groups
Times = Callable[[ConvolutionShape], Mapping[str, float] | None]


@dataclass(frozen=True, slots=True)
class ConvolutionUse:
    """A convolution of a program, the code that computes it, and what each took when measured."""

    of: ConvolutionShape
    native: bool
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{way} {1e6 * s:.0f} us" for way, s in self.seconds.items())
        return f"{self.of}: {'native' if self.native else 'torch'}  (measured: {times})"


def plan(graph: fx.Graph, times: Times = convolution_times) -> dict[fx.Node, ConvolutionUse]:
    """Decide how the small convolutions of a graph are computed. Reads the graph only."""
    if product_choice().forced is not None:
        return {}
    found = {}
    for node in graph.nodes:
        of = _shape_of(node)
        seconds = times(of) if of is not None else None
        if of is not None and seconds:
            native = seconds["native"] * _FASTER <= seconds["torch"]
            found[node] = ConvolutionUse(of, native, seconds)
    return found


def uses_of(functions: Iterable[Function]) -> tuple[ConvolutionUse, ...]:
    """The small convolutions of functions that Inductor compiles."""
    return tuple(use for function in functions for use in plan(function.graph.graph).values())


def _shape_of(node: fx.Node) -> ConvolutionShape | None:
    """What a node computes, if it is a small convolution that the other code can do."""
    mask: tuple[bool, ...] = ()
    if node.target is aten.convolution.default:
        x, weight, bias, stride, padding, *rest = node.args
    elif node.target is aten.convolution_backward.default:
        _, x, weight, _, stride, padding, *rest, wanted = node.args
        bias, mask = None, tuple(wanted)  # type: ignore[arg-type]
        if any(not mask[user.args[1]] for user in node.users):  # type: ignore[index]
            return None
    else:
        return None
    values = [source.meta["val"] for source in node.all_input_nodes]
    plain = all(v.dtype == torch.float32 and v.device.type == "cpu" for v in values)
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    images, kernels = x.meta["val"], weight.meta["val"]
    made = node.meta["val"]
    made = [made] if isinstance(made, torch.Tensor) else [v for v in made if v is not None]
    dense = all(map(is_dense, (images, kernels, *made)))
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
    return of if 0 < _operations(of) < _LARGE else None


def _operations(of: ConvolutionShape) -> int:
    """Of a forward pass."""
    sides = zip(of.x[2:], of.weight[2:], of.stride, of.padding, strict=True)
    places = prod((size + 2 * around - k) // step + 1 for size, k, step, around in sides)
    return 2 * of.x[0] * places * prod(of.weight)


def choose_convolutions(function: Function, times: Times = convolution_times) -> Function:
    """`function` with its small convolutions by the code that is faster here."""
    chosen = {node for node, use in plan(function.graph.graph, times).items() if use.native}
    if not chosen:
        return function
    graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in function.graph.graph.nodes:
        of[node] = (
            _call(graph, node, of) if node in chosen else graph.node_copy(node, of.__getitem__)
        )
    return make_function(function.name, fx.GraphModule(function.graph, graph))


def _call(graph: fx.Graph, node: fx.Node, of: Mapping[Any, fx.Node]) -> fx.Node:
    """The other code's call, as a copy of the convolution's node."""
    if node.target is aten.convolution.default:
        x, weight, bias, stride, padding, *_ = node.args
        args: tuple[Any, ...] = (of[x], of[weight], of.get(bias), stride, padding)
        call = graph.call_function(native_convolution, args)
    else:
        gradient, x, weight, _, stride, padding, *_, mask = node.args
        args = (of[gradient], of[x], of[weight], stride, padding, mask)
        call = graph.call_function(native_convolution_backward, args)
    call.meta = dict(node.meta)
    return call
