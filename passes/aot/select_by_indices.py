"""Select by indices a part of a tensor that begins at the value of another tensor.

Before   %u = aten._local_scalar_dense(%i: i64[])
         %y = aten.select(%x: f32[8,n], 0, %u)
         %z = aten.relu(%y)
         return (%z,)  with meta["desc"] = [PlainAOTOutput(0)]
After    %b = aten.where(aten.lt(%i, 0), aten.add(%i, 8), %i)       # from the end, or not
         %fits = aten.logical_and(aten.ge(%b, 0), aten.le(%b, 7))
         %s = aten.where(%fits, %b, aten.full_like(%b, 8))           # no element has the index 8
         %k = aten.arange(1, dtype=torch.int64, device=torch.device("cpu"))
         %y = aten.squeeze(aten.index_select(%x, 0, aten.add(%k, %s)), 0)
         %z = aten.relu(%y)
Keeps    values, shapes, dtypes, source lines. Whole numbers are int64, truth values are bool,
         others float64. A place outside of the tensor is an error when the program runs.
Source   `torch.narrow` with a tensor as its start, `torch.select` with a number from a tensor, and
         their forms after autograd and the removal of writes.

A returned cut must share memory with its input: the program computes where it begins, and its
caller cuts.
"""

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.capture.private.aot import PlainAOTOutput
from ipu_dynamo.capture.private.dynamo import static
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import is_view
from ipu_dynamo.ops.private.node_meta import DESC
from ipu_dynamo.passes.graph.builder import evaluate
from ipu_dynamo.passes.kit import GraphPass

_FIRST_OPTION: dict[Any, int] = {  # position of the argument `dim`; the place follows it
    aten.slice.Tensor: 1,
    aten.slice_scatter.default: 2,
    aten.slice_backward.default: 2,
    aten.select.int: 1,
    aten.select_scatter.default: 2,
    aten.select_backward.default: 2,
}
_CUTS = (aten.slice.Tensor, aten.select.int)
_SAME: dict[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.neg: aten.neg.default,
    operator.lt: aten.lt.Tensor,
    operator.le: aten.le.Tensor,
    operator.gt: aten.gt.Tensor,
    operator.ge: aten.ge.Tensor,
    operator.eq: aten.eq.Tensor,
    operator.ne: aten.ne.Tensor,
    operator.and_: aten.logical_and.default,
    operator.or_: aten.logical_or.default,
    torch.sym_not: aten.logical_not.default,
    torch.sym_ite: aten.where.self,
    torch.sym_min: aten.minimum.default,
    torch.sym_max: aten.maximum.default,
}
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


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


def number_as_tensor(number: Any, *, plan: bool = False) -> fx.Node | None:
    """The tensor of a number that operators read from tensors; None where it is not known how.

    Args:
        plan: only ask, and get the number itself.

    The new nodes are before the node `number`, and have its source line.
    """
    if not isinstance(number, fx.Node) or not _is_known(number):
        return None
    return number if plan else _converted(number, {})


def insert(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call that has the metadata of `before`, which it helps to replace, and its own value."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta = dict(before.meta)
    node.meta["val"] = evaluate(node, before)
    return node


def _is_known(number: fx.Node) -> bool:
    """Whether all that a number is computed from can be computed in tensors."""
    if number.target is aten._local_scalar_dense.default:
        return True
    parts = [part for part in number.args if not isinstance(part, bool | int | float)]
    known = all(isinstance(part, fx.Node) and _is_known(part) for part in parts)
    return number.target in _SAME and bool(parts) and known


def _converted(number: fx.Node, done: dict[fx.Node, fx.Node]) -> fx.Node:
    if number in done:
        return done[number]
    if number.target is aten._local_scalar_dense.default:
        tensor: Any = number.args[0]
        value = tensor.meta["val"]
        if value.dim():
            tensor = insert(number, aten.view.default, tensor, [])
        wide = torch.float64 if value.dtype.is_floating_point else torch.int64
        if value.dtype not in (torch.bool, wide):
            tensor = insert(number, aten._to_copy.default, tensor, dtype=wide)
        done[number] = tensor
        return done[number]
    numbers = [part for part in number.args if isinstance(part, fx.Node)]
    tensors = {part: _converted(part, done) for part in numbers}
    like = tensors[numbers[0]]
    parts = [
        tensors[part]
        if isinstance(part, fx.Node)
        else insert(number, aten.full_like.default, like, part, dtype=_DTYPES[type(part)])
        for part in number.args
    ]
    done[number] = insert(number, _SAME[number.target], *parts)
    return done[number]


def model_results(graph: fx.Graph) -> list[tuple[int, fx.Node]]:
    """Return the model's own results in a graph of AOTAutograd, with their places.

    The other results are gradients, and new values of inputs.
    """
    output = graph.output_node()
    returned: Any = output.args[0]
    described = output.meta[DESC]
    return [
        (place, node)
        for place, (node, desc) in enumerate(zip(returned, described, strict=True))
        if isinstance(node, fx.Node) and isinstance(desc, PlainAOTOutput)
    ]


def returned_cut(node: fx.Node) -> ReturnedCut | None:
    """Return the caller's cut for the result `node`, if a tensor's value says where to cut."""
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


def _cuts_at_values(graph: fx.Graph) -> list[fx.Node]:
    """Return the cuts at values with known lengths, except those returned as views."""
    results = {node for _, node in model_results(graph)}
    return [
        node
        for target in _FIRST_OPTION
        for node in graph.find_nodes(op="call_function", target=target)
        if _options(node) is not None and not (target in _CUTS and _is_returned(node, results))
    ]


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


def erase_unused(node: fx.Node) -> None:
    """Erase `node`, and the nodes that only it read."""
    if node.users or node.op == "placeholder":
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        erase_unused(source)


class SelectByIndices(GraphPass):
    """The pass. Other cuts at values are refused later."""

    level = "joint"
    acts_on = tuple(_FIRST_OPTION)

    def rewrite(self, capture: Joint) -> bool:
        cuts = _cuts_at_values(capture.graph.graph)
        for node in cuts:
            _select(node)
            erase_unused(node)
        return bool(cuts)
