"""Let a traced model cut windows at values: `t[s : s + n]` with a tensor `s`.

Call     x[i * 4 : (i + 1) * 4]                      i is a tensor of the trace
Recorded aten.index_select(x, 0, i * 4 + aten.arange(4))

Shapes are static, so the length of a window has to follow from the operators that compute its ends.
Both ends are the same sum of integer tensors times numbers, and differ by a number. Other windows
are refused.
A window is a copy, where PyTorch gives a view: `refuse_written_windows` looks for writes that would
show the difference.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ipu_dynamo.capture.private.tracing import constant_value, is_fake, node_of, tracer_here
from ipu_dynamo.errors import CompileError, called_from, source_line
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.control_flow import FLOW
from ipu_dynamo.ops.graph_queries import (
    is_view_operator,
    owner,
    writes,
    written_arguments,
)

Window = Callable[[Tensor, int, Tensor, int, int], Tensor]
WINDOW = "ipu.window"  # key of node.meta: a copy that stands for a view
_WIDE = (torch.int32, torch.int64)  # smaller ones overflow within the length of a tensor
_SUMS = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_CASTS = (aten.to.dtype, aten._to_copy.default)


def window(tensor: Tensor, dim: int, start: Tensor, length: int, step: int) -> Tensor:
    """`tensor` from `start` on along `dim`, of `length` elements every `step`-th.

    Where PyTorch would give fewer elements, because the window leaves the tensor, the run fails.
    """
    size = tensor.shape[dim]
    start = start.reshape(()).to(torch.int64)
    from_end = (start >= -size) & (start + length < 0)  # else its end counts from the front
    outside = torch.where(from_end, start + size, size)  # no tensor has an element at `size`
    steps = torch.arange(0, length, step, device=tensor.device)
    return tensor.index_select(dim, torch.where(start >= 0, start, outside) + steps)


@dataclass(frozen=True, slots=True)
class SliceRules:
    """How slices at values are cut, and what errors suggest in their place.

    Args:
        cut: makes a window of a tensor, a dim, a start, a length and a step.
        reading: the call to use in place of a slice that is refused.
        writing: the same for a slice that is assigned to.
    """

    cut: Window = window
    reading: str = "t[s : s + n] with an int n, or t.index_select(dim, s + torch.arange(n))"
    writing: str = "t.index_copy_(dim, s + torch.arange(n), value)"


_PLAIN = SliceRules()
_rules: ContextVar[SliceRules] = ContextVar("ipu_slice_rules", default=_PLAIN)


@contextmanager
def slicing_by(rules: SliceRules) -> Iterator[None]:
    """Let traces of this thread follow other rules."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


class DynamicSlices(TorchFunctionMode):
    """While entered, slices whose bounds are tensors of the trace select by indices."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in (Tensor.__getitem__, Tensor.__setitem__):
            return func(*args, **(kwargs or {}))
        if not _is_dynamic(args[1]) or not _is_sliced_alone(args[1]):
            return func(*args)
        if func is Tensor.__getitem__:
            return _sliced(*args)
        raise CompileError(
            "a slice whose bounds are tensors cannot be assigned to",
            where=called_from(),
            hint=_rules.get().writing,
            id="value",
        )


def _sliced(tensor: Tensor, index: Any) -> Tensor:
    items = list(index) if isinstance(index, tuple) else [index]
    for place, dim in _dims(items, tensor.dim()):
        item = items[place]
        if not _is_dynamic(item):
            continue
        length, step = _length(item), 1 if item.step is None else item.step
        if length is None or not isinstance(step, int) or step < 1:
            raise CompileError(
                "how long a slice is depends on the values of its bounds, which are not known "
                "when compiling",
                where=called_from(),
                hint=_rules.get().reading,
                id="value",
            )
        if length > tensor.shape[dim]:
            raise CompileError(
                f"a slice of {length} elements is longer than dimension {dim}, which has "
                f"{tensor.shape[dim]}",
                where=called_from(),
                id="value",
            )
        tensor = _rules.get().cut(tensor, dim, item.start, length, step)
        node = node_of(tensor, tracer_here())
        assert node is not None, "what is traced is in the graph"
        node.meta[WINDOW] = True
        items[place] = slice(None)
    return tensor[tuple(items)]


def _is_dynamic(index: Any) -> bool:
    """Whether a bound of a slice is a tensor of a trace that is no constant."""
    if isinstance(index, tuple):
        return any(map(_is_dynamic, index))
    bounds = (index.start, index.stop, index.step) if isinstance(index, slice) else ()
    return any(is_fake(bound) and constant_value(bound) is None for bound in bounds)


def _is_sliced_alone(index: Any) -> bool:
    """Whether an index has no tensors but in slices: how many dims each item takes is plain."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None or item is Ellipsis or isinstance(item, slice | int)
        for item in items
        if not isinstance(item, bool)
    )


def _dims(items: Sequence[Any], rank: int) -> Iterator[tuple[int, int]]:
    """The places of the slices in an index, and the dims that they cut."""
    taking = [item for item in items if _takes_a_dim(item)]
    dim = 0
    for place, item in enumerate(items):
        if item is Ellipsis:
            dim += rank - len(taking)
        elif isinstance(item, slice):
            yield place, dim
        dim += _takes_a_dim(item)


def _takes_a_dim(item: Any) -> bool:
    return isinstance(item, slice | int) and not isinstance(item, bool)


def _length(item: slice) -> int | None:
    """How many elements are between the bounds of a slice, if that is the same for all values."""
    if not all(is_fake(bound) and _is_index(bound) for bound in (item.start, item.stop)):
        return None
    tracer = tracer_here()
    begin, end = (node_of(bound, tracer) for bound in (item.start, item.stop))
    if begin is None or end is None:
        return None
    seen: list[fx.Node] = []
    (first, before), (last, after) = _sum(begin, seen), _sum(end, seen)
    if first != last or _written_since(seen) or after < before:
        return None
    return after - before


def _is_index(tensor: Tensor) -> bool:
    return tensor.dtype in _WIDE and tensor.numel() == 1


def _sum(node: fx.Node, seen: list[fx.Node], factor: int = 1) -> tuple[Counter[Hashable], int]:
    """A number as a sum of others times numbers, and a number that is added.

    Args:
        seen: gets the nodes whose values it is made of.
    """
    seen.append(node)
    terms, number = Counter[Hashable](), 0
    parts: list[tuple[Any, int]]
    if node.target in _SUMS and len(node.args) == 2 and not node.kwargs and _is_whole(node):
        parts = [(node.args[0], factor), (node.args[1], factor * _SUMS[node.target])]
    elif node.target in _PRODUCTS and _is_whole(node) and isinstance(node.args[1], int):
        parts = [(node.args[0], factor * node.args[1])]
    else:
        return Counter({_look(node, seen): factor}), 0
    for part, times in parts:
        if isinstance(part, fx.Node):
            more, added = _sum(part, seen, times)
            for term, count in more.items():
                terms[term] += count
            number += added
        else:
            number += times * part
    return Counter({term: count for term, count in terms.items() if count}), number


def _is_whole(node: fx.Node) -> bool:
    """Whether a node computes integers of one type: where they overflow, all do alike."""
    dtype = node.meta["val"].dtype
    numbers = [part for part in node.args if not isinstance(part, fx.Node)]
    same = all(part.meta["val"].dtype == dtype for part in node.all_input_nodes)
    return same and all(isinstance(number, int) for number in numbers)


def _look(node: fx.Node, seen: list[fx.Node]) -> Hashable:
    """A key that identifies a number: equal views and casts of one tensor have the same key."""
    seen.append(node)
    rest = (*node.args[1:], *node.kwargs, *node.kwargs.values())
    plain = all(isinstance(part, int | str | torch.dtype) for part in rest)
    if not plain or not (is_view_operator(node.target) or node.target in _CASTS):
        return node
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return (node.target, _look(source, seen), rest)


def _written_since(nodes: Sequence[fx.Node]) -> bool:
    """Whether the memory of a value has been written after the value was made."""
    order = {node: place for place, node in enumerate(nodes[0].graph.nodes)}
    made: dict[fx.Node, int] = {}
    for node in nodes:
        memory = _memory(node)
        made[memory] = min(order[node], made.get(memory, order[node]))
    return any(
        order[write] > made.get(_memory(written), order[write])
        for write in order
        for written in written_arguments(write)
    )


def _memory(node: fx.Node) -> fx.Node:
    """The node that made the memory of a tensor, through views and in-place writes."""
    while True:
        made = owner(node)
        written = written_arguments(made)
        if not written:
            return made
        node = written[0]


def refuse_written_windows(graph: fx.Graph) -> None:
    """Refuse writes that show that a window is a copy, where PyTorch gives a view.

    Raises:
        CompileError: a window is written, is read after the tensor that it is cut from was, or is
            read by strides of the tensor.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    windows = [node for node in order if WINDOW in node.meta]
    for node in order:
        for body in node.meta[FLOW].bodies if FLOW in node.meta else ():
            refuse_written_windows(body.graph.graph)
    if not windows:
        return
    memory = {node: _memory(node) for node in order}
    for view in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        if memory[view] in windows:
            raise CompileError(
                "a slice whose bounds are tensors has strides of its own, so as_strided would read "
                "other elements",
                node=view,
                hint="call as_strided with the tensor that is sliced",
                id="value",
            )
    for write in filter(writes, order):
        written = {memory[argument] for argument in written_arguments(write)}
        for cut in windows:
            if order[cut] > order[write]:
                continue
            views = [node for node in order if memory[node] is cut]
            late = any(order[user] > order[write] for view in views for user in view.users)
            if cut in written or (late and _origin(cut) in written):
                what = "is written" if cut in written else "is read after its tensor was written"
                raise CompileError(
                    f"a slice whose bounds are tensors {what}: programs have a copy of it, where "
                    f"PyTorch has a view\n  cut:  {source_line(cut)}",
                    where=source_line(write),
                    hint="write to t[s : s + n].clone(), or write first",
                    id="value",
                )


def _origin(cut: fx.Node) -> fx.Node:
    """The memory that a window, or a window of windows, is cut from."""
    while WINDOW in cut.meta:
        cut = _memory(cut.all_input_nodes[0])
    return cut
