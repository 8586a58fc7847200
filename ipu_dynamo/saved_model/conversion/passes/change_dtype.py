"""Let a group of operators compute in another type, whatever its operators make of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.passes.graph.builder import evaluate
from ipu_dynamo.saved_model.conversion.node_groups import NodeGroup, name_of
from ipu_dynamo.saved_model.conversion.passes.edit import aten, insert_call
from ipu_dynamo.saved_model.exported.node_names import operator_name

# Whose numbers are values of the result's type and no factors: beyond its range they are the limit.
_FILLS = frozenset(
    [
        *("aten.full.default", "aten.full_like.default", "aten.new_full.default"),
        *("aten.masked_fill.Scalar", "aten.fill.Scalar", "aten.scalar_tensor.default"),
        *("aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar"),
        *("aten.constant_pad_nd.default", "aten.pad.default", "aten.hardtanh.default"),
        *("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default"),
    ]
)
Check = Callable[[fx.Node, int], None]


def cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype, name: str) -> fx.Node:
    """A cast that a conversion puts in, at the insertion point."""
    return insert_call(graph, aten._to_copy.default, source, dtype=dtype, name=name, cast=True)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The type of a node's value, if that is one tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def change_dtype(node: fx.Node, old: torch.dtype, new: torch.dtype) -> None:
    """Let a node whose inputs have changed compute in `new`, and give it where it gave `old`.

    Raises:
        ValueError: its operator cannot.
    """
    gave_old = dtype_of(node) == old
    _change_arguments(node, old, new)
    try:
        node.meta["val"] = evaluate(node)
    except Exception as error:  # operators raise many types for types that they do not take
        raise ValueError(
            f"node {name_of(node)!r} ({operator_name(node)}) does not compute in {new} "
            f"({str(error).splitlines()[0][:120]}): exclude it from the conversion"
        ) from error
    if gave_old and dtype_of(node) != new:
        give_as(node, new)


def give_as(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Put a cast behind a node, as part of its group, for all that read it."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        cast_node = insert_call(
            node.graph, aten._to_copy.default, node, dtype=dtype, name=name_of(node)
        )
    for user in users:
        user.replace_input_with(node, cast_node)
    return cast_node


def take_as(node: fx.Node, source: fx.Node, dtype: torch.dtype) -> None:
    """Put a cast between a node and what it reads, as part of the node's group."""
    with node.graph.inserting_before(node):
        cast_node = insert_call(
            node.graph, aten._to_copy.default, source, dtype=dtype, name=name_of(node)
        )
    node.replace_input_with(source, cast_node)


def scalars(node: fx.Node) -> list[Any]:
    """The numbers among the arguments that are values, as sizes and positions are not."""
    if not isinstance(node.target, OpOverload):
        return []
    arguments = node.target._schema.arguments
    by_name = {a.name: value for a, value in zip(arguments, node.args, strict=False)}
    by_name |= node.kwargs
    numbers = [by_name.get(a.name) for a in arguments if "number" in str(a.type).lower()]
    return [number for number in numbers if isinstance(number, int | float)]


def _change_arguments(node: fx.Node, old: torch.dtype, new: torch.dtype) -> None:
    clamps = new.is_floating_point and operator_name(node) in _FILLS
    limit = torch.finfo(new).max if clamps else 0.0

    def changed(value: Any) -> Any:
        if value is old:
            return new
        if clamps and isinstance(value, float) and limit < abs(value) < float("inf"):
            return limit if value > 0 else -limit
        return value

    node.args = map_aggregate(node.args, changed)
    node.kwargs = map_aggregate(node.kwargs, changed)
    if node.target in _FACTORIES and "dtype" not in node.kwargs and dtype_of(node) == old:
        node.kwargs = {**node.kwargs, "dtype": new}


_FACTORIES = frozenset(
    [
        *(aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default),
        *(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default),
    ]
)


def group_nodes(group: NodeGroup) -> list[fx.Node]:
    """The calls of a group, in order."""
    return [node for node in group.nodes if node.op == "call_function"]
