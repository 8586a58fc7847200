"""Ask what the nodes of a graph do: look at memory, write it, or make a tensor of their own.

One answer for capture, passes, engines and the debugger. `_schema` is the one private name here.
"""

from collections.abc import Callable, Iterable
from operator import getitem
from typing import Any

import torch
from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.private.graphs import OpOverload, schema_of

UNFILLED = frozenset(  # a copy follows; until then their memory holds anything
    {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
)


def is_view_operator(target: object) -> bool:
    """Whether an operator gives its first argument's memory, seen in another way."""
    return isinstance(target, OpOverload) and bool(target.is_view)


def is_view(node: fx.Node) -> bool:
    """Whether `node` only looks at the memory of its first argument; of several views, one."""
    if node.target is getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    return is_view_operator(node.target)


def only_looks(node: fx.Node) -> bool:
    """Whether `node` computes nothing: a view, or one of several results."""
    return node.target is getitem or is_view_operator(node.target)


def is_new(node: fx.Node) -> bool:
    """Whether the result of an operator, or one of several, is a tensor of its own."""
    source, place = (node.args[0], node.args[1]) if node.target is getitem else (node, 0)
    if not isinstance(source, fx.Node) or not isinstance(source.target, OpOverload):
        return False
    results = schema_of(source.target).returns
    result = results[place] if isinstance(place, int) and place < len(results) else results[0]
    return result.alias_info is None


def writes(node: fx.Node) -> bool:
    """Whether `node` changes one of its arguments in place."""
    return isinstance(node.target, OpOverload) and bool(schema_of(node.target).is_mutable)


def written_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that `node` changes in place, in the order of its schema."""
    if not writes(node):
        return ()
    written: list[fx.Node] = []
    assert isinstance(node.target, OpOverload)
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        by_position = position < len(node.args) and not argument.kwarg_only
        value = node.args[position] if by_position else node.kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else (value,)
        written += [item for item in values if isinstance(item, fx.Node)]
    return tuple(written)


def root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` looks at: itself, unless it is a view."""
    while is_view(node):
        (node,) = node.all_input_nodes[:1]
    return node


def owner(node: fx.Node) -> fx.Node:
    """The node whose memory `node` shares; for one of several results, the operator itself."""
    while only_looks(node):
        node = node.all_input_nodes[0]
    return node


def needed_for(
    nodes: Iterable[fx.Node], through: Callable[[fx.Node], bool] = lambda node: True
) -> set[fx.Node]:
    """Collect `nodes` and all that they are computed from.

    Args:
        through: whether to go on from a node to its inputs.
    """
    needed, pending = set[fx.Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes if through(node) else ()
    return needed


def depending_on(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Collect `nodes` and all that is computed from them."""
    depending, pending = set[fx.Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in depending and node.op != "output":
            depending.add(node)
            pending += node.users
    return depending


def may_draw(node: fx.Node) -> bool:
    """Whether the operator of `node` draws random numbers of PyTorch's generator, at least for
    some arguments."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def draws(node: fx.Node) -> bool:
    """Whether `node`, or a body that it runs, draws random numbers of PyTorch's generator.
    Attention without dropout does not."""
    if any(draws(inner) for body in bodies_of(node) for inner in body.graph.graph.nodes):
        return True
    if not (isinstance(node.target, OpOverload) and may_draw(node)):
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    probability = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(probability != 0.0)


def makes_constant(node: fx.Node) -> bool:
    """Whether `node` computes the same small tensor every time, from no tensor at all."""
    return (
        isinstance(node.target, OpOverload)
        and not node.all_input_nodes
        and not node.is_impure()
        and not may_draw(node)
    )


def numel(value: Any) -> int:
    """How many elements a tensor has; 0 for anything else."""
    return value.numel() if isinstance(value, torch.Tensor) else 0


def nbytes(node: fx.Node) -> int:
    """Bytes of the tensors that a node makes."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
