"""Find the states that a step may overwrite with their new values while it reads them."""

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import is_view_operator
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.tune.matmul_classes import MATMULS

# Elementwise operators of whose arguments every value counts. `sign`, `clamp`, `maximum` or a mask
# hide some: a trial could not show whether a state was read once more after its new value.
_COUNTING = {
    overloads.packet
    for overloads in (
        aten.add, aten.addcdiv, aten.addcmul, aten.div, aten.exp, aten.lerp, aten.mul, aten.neg,
        aten.pow, aten.reciprocal, aten.rsqrt, aten.rsub, aten.sqrt, aten.square, aten.sub,
        aten.tanh,
    )
}  # fmt: skip
_ROUNDING = {aten.div.Tensor_mode, aten.div.Scalar_mode}


def overwritten_states(graph: fx.Graph, count: int) -> tuple[int, ...]:
    """Return those of the first `count` inputs that may be overwritten by their new values.

    A step's new states are its first results. One loop of generated code may overwrite an old state
    with the new one if it reads each element just where it writes it. So both have the same layout,
    and all operators on the old state are elementwise, up to matmuls, which are calls of their own.
    The order of these calls is known when they are recorded. The recorder also tries random values,
    all of which have to count. So operators that choose between values or hide some are refused,
    except for momentum that begins with the first gradient.
    """
    inputs = graph.find_nodes(op="placeholder")[:count]
    results = graph.output_node().args[0]
    assert isinstance(results, Sequence)
    return tuple(
        number
        for number, (before, after) in enumerate(zip(inputs, results, strict=False))
        if isinstance(after, fx.Node) and _layout(before) == _layout(after) and _is_free(before)
    )


def _is_free(state: fx.Node) -> bool:
    """Whether the operators on a state are elementwise, up to matmuls and results."""
    readers = _readers(state)
    return all(
        reader.op == "output" or _is_elementwise(reader, state) or _is_a_call(reader)
        for reader in readers
    )


def _readers(state: fx.Node) -> set[fx.Node]:
    """Return the nodes that generated code may compute in the loop that reads a state."""
    found: set[fx.Node] = set()
    waiting = [*state.users]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        if not _is_a_call(node):
            waiting += node.users
    return found


def _is_a_call(node: fx.Node) -> bool:
    """Whether a matmul, or a view of a matrix for matmuls alone, is called by itself."""
    if is_view_operator(node.target):
        return bool(node.users) and all(_is_a_call(user) for user in node.users)
    sizes = [size for matrix in _matrices(node) for size in matrix]
    return node.target in MATMULS and bool(sizes) and min(sizes) > 1  # else it may be a loop


def _matrices(node: fx.Node) -> Iterator[torch.Size]:
    for value in node.all_input_nodes:
        tensor = value.meta.get("val")
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
            yield tensor.shape


def _is_elementwise(node: fx.Node, state: fx.Node) -> bool:
    """Whether each element depends on that element of the state, where states are not 0."""
    target = node.target
    if not isinstance(target, OpOverload) or _layout(node) != _layout(state):
        return False
    if target is aten.where.self:
        return _begins(node, state)
    return target.overloadpacket in _COUNTING and target not in _ROUNDING


def _begins(node: fx.Node, state: fx.Node) -> bool:
    """Whether a node is `where(number == 0, first, %other)`, of which `first` reads no state."""
    condition, first = node.args[:2]
    if not isinstance(condition, fx.Node) or condition.target is not aten.eq.Scalar:
        return False
    number, compared = condition.args
    is_state = isinstance(number, fx.Node) and number.op == "placeholder"
    is_zero = isinstance(compared, int | float) and compared == 0
    return is_state and is_zero and first not in _readers(state) and first is not state


def _layout(node: fx.Node) -> tuple[object, ...] | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.shape, value.stride(), value.dtype
