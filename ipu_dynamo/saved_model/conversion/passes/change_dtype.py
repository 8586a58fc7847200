"""Let a group of operators compute in another type, also if some operators set their own."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.graphs import FakeTensorMode, OpOverload, schema_of
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup, name_of
from ipu_dynamo.saved_model.conversion.passes.edit import insert_call, with_dtype
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
_ANY_SIZE = 2  # of what only data tell


def cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype, name: str) -> fx.Node:
    """A cast that a conversion puts in, at the insertion point."""
    value = with_dtype(source.meta["val"], dtype)
    return insert_call(
        graph, aten._to_copy.default, source, dtype=dtype, name=name, value=value, cast=True
    )


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
        node.meta["val"] = _with_types_of(node.meta["val"], evaluate_small(node))
    except Exception as error:  # operators raise many types for types that they do not take
        raise ValueError(
            f"node {name_of(node)!r} ({operator_name(node)}) does not compute in {new} "
            f"({str(error).splitlines()[0][:120]}): exclude it from the conversion"
        ) from error
    if gave_old and dtype_of(node) != new:
        give_as(node, new)


def give_as(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a cast after a node, as part of its group, for all readers."""
    users = list(node.users)
    value = with_dtype(node.meta["val"], dtype)
    with node.graph.inserting_after(node):
        cast_node = insert_call(
            node.graph, aten._to_copy.default, node, dtype=dtype, name=name_of(node), value=value
        )
    for user in users:
        user.replace_input_with(node, cast_node)
    return cast_node


def take_as(node: fx.Node, source: fx.Node, dtype: torch.dtype) -> None:
    """Insert a cast between a node and one of its inputs, as part of the node's group."""
    value = with_dtype(source.meta["val"], dtype)
    with node.graph.inserting_before(node):
        cast_node = insert_call(
            node.graph, aten._to_copy.default, source, dtype=dtype, name=name_of(node), value=value
        )
    node.replace_input_with(source, cast_node)


def evaluate_small(node: fx.Node) -> Any:
    """Compute a node's result on fake inputs of its types, with the sizes of an example.

    Operators that read a size would compare, and so fix, the sizes that calls choose.
    """
    with FakeTensorMode() as mode:

        def example(source: fx.Node) -> Any:
            return _example(source.meta["val"])

        args, kwargs = map_arg((node.args, dict(node.kwargs)), example)
        with torch.no_grad(), mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]


def _example(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_example(part) for part in value)
    if isinstance(value, Tensor):
        shape, stride = map(_example, value.shape), map(_example, value.stride())
        return torch.empty_strided(
            list(shape), list(stride), dtype=value.dtype, device=value.device
        )
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint if value.node.has_hint() else _ANY_SIZE
    return value


def _with_types_of(old: Any, new: Any) -> Any:
    """The sizes of one value with the types of another."""
    if isinstance(old, tuple | list):
        return type(old)(_with_types_of(*pair) for pair in zip(old, new, strict=True))
    if isinstance(old, Tensor) and old.dtype != new.dtype:
        return with_dtype(old, new.dtype)
    return old


def scalars(node: fx.Node) -> list[Any]:
    """The numbers among the arguments that are values, as sizes and positions are not.

    The graph has them where the schema says number, and where it says tensor.
    """
    if not isinstance(node.target, OpOverload):
        return []
    arguments = schema_of(node.target).arguments
    by_name = {a.name: value for a, value in zip(arguments, node.args, strict=False)}
    by_name |= node.kwargs
    kinds = {a.name: str(a.type) for a in arguments}
    numbers = [v for n, v in by_name.items() if "number" in kinds[n] or "Tensor" in kinds[n]]
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
