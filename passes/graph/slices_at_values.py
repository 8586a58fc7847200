"""Select by indices what a graph cuts from a tensor at a place that is the value of another.

Before   %u: Sym(u0) = aten._local_scalar_dense(%i);  aten.slice.Tensor(%x, 0, %u, %end)
After    aten.index_select(%x, 0, %i + aten.arange(length))
Keeps    values, shapes, dtypes, source lines. A place outside of the tensor is an error when the
         program runs.
Source   `torch.narrow` with a tensor as its start, `torch.select` with a number from a tensor, and
         what autograd and the removal of writes make of them.

A cut that is returned is to share memory with the input that it is cut from: the program computes
where it begins, and its caller cuts.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.aot import PlainAOTOutput
from ipu_dynamo.capture.private.dynamo import static
from ipu_dynamo.ops.graph_queries import is_view
from ipu_dynamo.passes.graph.read_numbers import insert, number_as_tensor

aten = torch.ops.aten
_FIRST_OPTION: dict[Any, int] = {  # where the dim stands among the arguments, then the place
    aten.slice.Tensor: 1,
    aten.slice_scatter.default: 2,
    aten.slice_backward.default: 2,
    aten.select.int: 1,
    aten.select_scatter.default: 2,
    aten.select_backward.default: 2,
}
_CUTS = (aten.slice.Tensor, aten.select.int)


@dataclass(frozen=True)
class ReturnedCut:
    """A cut of an input that is a result.

    Args:
        argument: which input.
        dim: along which it is cut.
        length: how much of it; None for one element, without the dim.
    """

    argument: int
    dim: int
    length: int | None

    def __call__(self, whole: Tensor, start: int) -> Tensor:
        if self.length is None:
            return whole.select(self.dim, start)
        return whole.narrow(self.dim, start, self.length)


def model_results(graph: fx.Graph) -> list[tuple[int, fx.Node]]:
    """What a graph of AOTAutograd computes of the model's own results, with their places: the
    others are gradients, and new values of inputs."""
    output = graph.output_node()
    returned: Any = output.args[0]
    described = output.meta["desc"]
    return [
        (place, node)
        for place, (node, desc) in enumerate(zip(returned, described, strict=True))
        if isinstance(node, fx.Node) and isinstance(desc, PlainAOTOutput)
    ]


def returned_cut(node: fx.Node) -> ReturnedCut | None:
    """How the caller cuts what is `node`, a result, if the value of a tensor says where."""
    if node.target not in _CUTS or (options := _options(node)) is None:
        return None
    inputs = list(node.graph.find_nodes(op="placeholder"))
    if node.args[0] not in inputs:
        return None
    dim, _, length = options
    kept = None if node.target is aten.select.int else length
    return ReturnedCut(inputs.index(node.args[0]), dim, kept)


def start_of_cut(node: fx.Node) -> fx.Node:
    """Where a cut begins, in a tensor of no dims."""
    options = _options(node)
    assert options is not None, "only of cuts at values"
    start = number_as_tensor(options[1])
    assert start is not None
    return start


def select_by_indices(graph: fx.Graph) -> list[fx.Node]:
    """Compute by indices the cuts at values whose lengths are known.

    Returns:
        The cuts, which nobody reads any more. What is returned as a view of something stays.
    """
    results = {node for _, node in model_results(graph)}
    cuts = [
        node
        for target in _FIRST_OPTION
        for node in graph.find_nodes(op="call_function", target=target)
        if _options(node) is not None and not (target in _CUTS and _is_returned(node, results))
    ]
    for node in cuts:
        _select(node)
    return cuts


def _is_returned(node: fx.Node, results: Collection[fx.Node]) -> bool:
    """Whether one of `results` shares memory with `node`."""
    views = [user for user in node.users if is_view(user)]
    return node in results or any(_is_returned(view, results) for view in views)


def _options(node: fx.Node) -> tuple[int, fx.Node, int] | None:
    """Dim, place and length of a cut, if the value of a tensor is the place and sizes are known."""
    first = _FIRST_OPTION[node.target]
    given: tuple[Any, ...] = (*node.args[first:], *[None] * 4)
    dim, place, _, step = given[:4]
    is_slice = "slice" in str(node.target)
    whole, part = map(static, _shapes(node))
    if whole is None or part is None or (is_slice and step not in (None, 1)):
        return None
    if not isinstance(place, fx.Node) or number_as_tensor(place, plan=True) is None:
        return None
    assert dim is None or isinstance(dim, int)
    dim = (dim or 0) % len(whole)
    return dim, place, part[dim] if is_slice else 1


def _select(node: fx.Node) -> None:
    """Replace a cut by a selection."""
    options = _options(node)
    assert options is not None
    dim, _, length = options
    size = static(_shapes(node)[0])[dim]
    index = _indices(node, start_of_cut(node), size, length)
    is_slice = "slice" in str(node.target)
    source: Any = node.args[0]
    if node.target in _CUTS:
        result = insert(node, aten.index_select.default, source, dim, index)
        if not is_slice:
            result = insert(node, aten.squeeze.dim, result, dim)
    else:
        into, written = source, node.args[1]
        if "backward" in str(node.target):
            into = insert(node, aten.new_zeros.default, source, list(static(_shapes(node)[0])))
            written = source
        if not is_slice:
            written = insert(node, aten.unsqueeze.default, written, dim)
        result = insert(node, aten.index_copy.default, into, dim, index, written)
    node.replace_all_uses_with(result)


def _shapes(node: fx.Node) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shapes of the whole tensor and of the part."""
    first: Any = node.args[0]
    source, result = tuple(first.meta["val"].shape), tuple(node.meta["val"].shape)
    if node.target in _CUTS:
        return source, result
    if "backward" in str(node.target):
        return result, source
    written: Any = node.args[1]
    return source, tuple(written.meta["val"].shape)


def _indices(node: fx.Node, start: fx.Node, size: int, length: int) -> fx.Node:
    """`length` indices from `start` on, which counts from the end if it is negative.

    A start that leaves no room becomes `size`, which no tensor has an element at.
    """
    is_negative = insert(node, aten.lt.Scalar, start, 0)
    from_end = insert(node, aten.add.Tensor, start, size)
    begin = insert(node, aten.where.self, is_negative, from_end, start)
    fits = insert(
        node,
        aten.logical_and.default,
        insert(node, aten.ge.Scalar, begin, 0),
        insert(node, aten.le.Scalar, begin, size - length),
    )
    begin = insert(
        node, aten.where.self, fits, begin, insert(node, aten.full_like.default, begin, size)
    )
    steps = insert(
        node, aten.arange.default, length, dtype=torch.int64, device=start.meta["val"].device
    )
    return insert(node, aten.add.Tensor, steps, begin)
