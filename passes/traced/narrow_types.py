"""Carry 64-bit types in 32 bits and bfloat16 as float16, as PopTorch did.

With     narrow=True
Before   %i: i64[m] = aten.argmax(%x: f32[m,n], 1)
         %e = aten.gather(%t: f32[k], 0, %i)
After    %i: i64[m] = aten.argmax(%x, 1)
         %n: i32[m] = aten.to(%i, torch.int32)
         %w: i64[m] = aten.to(%n, torch.int64)
         %e = aten.gather(%t, 0, %w)
Keeps    operators and source lines; values that fit the narrow types. Integer parameters and
         buffers that forward only reads become constants.
Source   PopTorch user guide, "Data types": INT64 and FLOAT64 are carried as INT32 and FLOAT32.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from ipu_dynamo.capture.capture import STAGE, Traced
from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.control_flow import control_flow_op
from ipu_dynamo.ops.graph_queries import is_view, is_view_operator, written_arguments
from ipu_dynamo.ops.precision.narrowing import NARROW
from ipu_dynamo.ops.private.graphs import OpOverload, schema_of
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.builder import call, evaluate
from ipu_dynamo.passes.kit import GraphPass

_WIDE = {torch.int32: torch.int64}
_MOVES_ONLY = frozenset(  # accept any integer type, besides pointwise operators and views
    {
        aten.cat.default,
        aten.stack.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.copy_.default,
        aten.fill_.Scalar,
        aten.lift_fresh_copy.default,
        aten.repeat.default,
        aten.reshape.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten.type_as.default,
        aten.zero_.default,
        control_flow_op,
    }
)
_INDEX_ARGUMENTS = frozenset(
    {"index", "indices", "target", "targets", "input_lengths", "target_lengths", "offsets"}
)


@dataclass
class _Narrowing:
    """The rewrite of one graph. `wide` holds the values that were 64 bits wide before it."""

    graph: fx.Graph
    wide: set[fx.Node]

    def rewrite(self, node: fx.Node) -> None:
        target = node.target
        node.args = map_aggregate(node.args, _narrow_dtype)
        node.kwargs = map_aggregate(node.kwargs, _narrow_dtype)
        if target is not getitem and not isinstance(target, OpOverload):
            return
        if isinstance(target, OpOverload) and not _takes_any_integer(target):
            self.widen_arguments(node, target)
        before = node.meta["val"]
        if isinstance(before, Tensor) and before.dtype in NARROW and not _takes_positions(target):
            node.args = map_aggregate(node.args, partial(_within, dtype=NARROW[before.dtype]))
        node.meta["val"] = evaluate(node)
        if isinstance(before, Tensor) and before.dtype in NARROW:
            self.narrow_result(node)

    def widen_arguments(self, node: fx.Node, target: OpOverload) -> None:
        """Give an operator the 64-bit integers that it had before."""
        names = [argument.name for argument in schema_of(target).arguments]
        changes_argument = schema_of(target).is_mutable

        def widened(argument: Any, name: str) -> Any:
            if changes_argument and name not in _INDEX_ARGUMENTS:
                return argument
            return map_arg(argument, lambda n: self.widened(n, node) if n in self.wide else n)

        node.args = tuple(widened(a, n) for a, n in zip(node.args, names, strict=False))
        node.kwargs = {name: widened(a, name) for name, a in node.kwargs.items()}

    def widened(self, source: fx.Node, user: fx.Node) -> fx.Node:
        dtype = _WIDE.get(source.meta["val"].dtype)
        if dtype is None:
            return source
        with self.graph.inserting_before(user):
            return self.cast(source, dtype, user)

    def narrow_result(self, node: fx.Node) -> None:
        value = node.meta["val"]
        self.wide.add(node)
        if value.dtype not in NARROW:
            return
        with self.graph.inserting_after(node):
            narrow = self.cast(node, NARROW[value.dtype], node)
        node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
        self.wide.add(narrow)

    def cast(self, source: fx.Node, dtype: torch.dtype, origin: fx.Node) -> fx.Node:
        return call(self.graph, aten.to.dtype, source, dtype, origin=origin)


class NarrowTypes(GraphPass):
    """The pass. `narrow`: whether to carry types as PopTorch did; otherwise nothing is done."""

    level = "traced"

    narrow: bool

    def applies(self, capture: Traced, contents: Contents) -> bool:
        return self.narrow

    def rewrite(self, capture: Traced) -> bool:
        if not self.narrow:
            return False
        graph = capture.graph.graph
        loss = capture.loss
        nodes = list(graph.nodes)
        wide = _narrow_placeholders(capture)
        narrowing = _Narrowing(graph, wide)
        for node in nodes:
            if node.op == "call_function":
                narrowing.rewrite(node)
        capture.loss = loss
        return True


def _narrow_placeholders(capture: Traced) -> set[fx.Node]:
    """Narrow the types of inputs and variables; freeze integers that stay as they are."""
    wide = set()
    roles = []
    for node, role in capture.roles().items():
        value = node.meta["val"]
        if value.dtype in NARROW:
            node.meta["val"] = _as_dtype(value, NARROW[value.dtype])
            wide.add(node)
        variable, changes = role.kind in ("parameter", "buffer"), _changes(node)
        if variable and not value.is_floating_point() and not changes:
            role = replace(role, kind="constant")
        if role.kind == "constant" and changes:
            frozen = _freeze(capture.graph.graph, node)
            if node in wide and frozen is not None:
                wide.add(frozen)
        roles.append(role)
    capture.placeholders = tuple(roles)
    return wide


def _freeze(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Let the model change a copy of a constant, for the rest of this micro-batch only."""
    first = next(iter(node.users), None)
    if first is None:
        return None
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        copy = graph.call_function(aten.clone.default, (node,))
    copy.meta = {"val": node.meta["val"]}
    if STAGE in first.meta:
        copy.meta[STAGE] = first.meta[STAGE]
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return copy


def _changes(node: fx.Node) -> bool:
    """Whether an operator writes to a tensor, or to a view of it."""
    return any(node in written_arguments(user) or _changed_view(user) for user in node.users)


def _changed_view(node: fx.Node) -> bool:
    return is_view(node) and _changes(node)


def _takes_any_integer(target: OpOverload) -> bool:
    return target in _MOVES_ONLY or torch.Tag.pointwise in target.tags or bool(target.is_view)


def _narrow_dtype(argument: Any) -> Any:
    return NARROW.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def _takes_positions(target: Any) -> bool:
    """Views take positions, which may be larger than any number of the result."""
    return target is getitem or is_view_operator(target)


def _within(argument: Any, dtype: torch.dtype) -> Any:
    """Clip a number to `dtype`: the largest of the wide type becomes the largest of the narrow."""
    if isinstance(argument, bool) or not isinstance(argument, int | float):
        return argument
    if isinstance(argument, float) and not math.isfinite(argument):
        return argument
    if dtype.is_complex or (isinstance(argument, float) and not dtype.is_floating_point):
        return argument
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return type(argument)(min(max(argument, limits.min), limits.max))


def _as_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    with fake_mode_of([value]):
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)
