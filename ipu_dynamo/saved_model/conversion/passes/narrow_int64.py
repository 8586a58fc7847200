"""Carry 64-bit integers in 32 bits on IPUs.

Before   input %x: i64; %y: i64 = aten.add(%x, 1)  on an IPU; result %y
After    %c: i32 = ipu.to_int32(%x)  on the host; %y: i32 = aten.add(%c, 1);
         %d: i64 = aten._to_copy(%y)  on the host; result %d
Keeps    types of inputs and results, values; one that does not fit is an error.
Source   IPU TensorFlow Addons, "IPU SavedModel CLI": int64_to_int32_conversion.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.library.to_int32 import to_int32
from ipu_dynamo.saved_model.conversion.drafts.draft import HOST, Draft
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup, name_of, owners
from ipu_dynamo.saved_model.conversion.passes.change_dtype import (
    cast,
    change_dtype,
    dtype_of,
    give_as,
    group_nodes,
    scalars,
    take_as,
)
from ipu_dynamo.saved_model.conversion.passes.edit import external_inputs, insert_call, with_dtype
from ipu_dynamo.saved_model.exported.node_names import Kind, short_name

_OLD, _NEW = torch.int64, torch.int32
_LIMITS = torch.iinfo(_NEW)
# They compute the same on 32-bit integers, and take them wherever they take 64-bit ones. Round any
# other operator are casts, in its own group.
_NARROW = frozenset(
    [
        *("add", "sub", "mul", "neg", "abs", "maximum", "minimum", "clamp", "clamp_min"),
        *("clamp_max", "eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "floor_divide"),
        *("remainder", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "logical_and"),
        *("logical_or", "logical_not", "sign", "view", "reshape", "flatten", "unflatten"),
        *("expand", "expand_as", "permute", "transpose", "t", "slice", "select", "squeeze"),
        *("unsqueeze", "cat", "concat", "stack", "split", "split_with_sizes", "chunk", "unbind"),
        *("unsafe_split", "clone", "contiguous", "_to_copy", "to", "type_as", "alias", "detach"),
        *("embedding", "index_select", "full", "full_like", "new_full", "zeros", "ones"),
        *("zeros_like", "ones_like", "new_zeros", "new_ones", "scalar_tensor", "arange", "any"),
        *("all", "amax", "amin", "argmax", "argmin", "sum", "prod", "cumsum", "flip", "roll"),
        *("repeat", "tile", "constant_pad_nd", "pad", "tril", "triu", "movedim", "dropout", "div"),
        *("true_divide", "rsub", "lift_fresh_copy", "getitem"),
    ]
)


@dataclass(frozen=True, slots=True)
class Narrowing:
    """The decision.

    Attributes:
        entries: 64-bit values that groups of IPUs read and the host has, with the names of casts.
        tensors: parameters that are held in 32 bits.
        exits: values that the host or a result reads, with the readers and the name of the cast;
            a reader None is a result.
    """

    entries: Mapping[fx.Node, str]
    tensors: tuple[fx.Node, ...]
    exits: tuple[tuple[fx.Node, NodeGroup | None, str], ...]


def plan(draft: Draft) -> Narrowing:
    """Find the borders. Reads the draft, changes nothing.

    Raises:
        ValueError: a parameter does not fit.
    """
    groups = draft.groups()
    owner = owners(groups)
    on_ipu = {group.name for group in groups if draft.placement.on_ipu(group.name)}
    entries: dict[fx.Node, str] = {}
    tensors: list[fx.Node] = []
    exits: list[tuple[fx.Node, NodeGroup | None, str]] = []
    for group in groups:
        for index, source in enumerate(external_inputs(group)):
            if dtype_of(source) != _OLD or group.is_size or group.kind is not Kind.OP:
                continue
            name = f"{group.name}/CastInsertion_{index}"
            from_ipu = owner[source].name in on_ipu
            if group.name in on_ipu and not from_ipu:
                if source in draft.tensors:
                    _check_range(source, draft.tensors[source])
                if source in draft.tensors and _only_ipus(source, owner, on_ipu):
                    tensors.append(source)
                else:
                    entries.setdefault(source, name)
            elif group.name not in on_ipu and from_ipu:
                exits.append((source, group, name))
    for output, node in draft.outputs.items():
        if dtype_of(node) == _OLD and owner[node].name in on_ipu:
            exits.append((node, None, f"{output}/CastInsertion_0"))
    return Narrowing(entries, tuple(dict.fromkeys(tensors)), tuple(exits))


def _only_ipus(node: fx.Node, owner: Mapping[fx.Node, NodeGroup], on_ipu: set[str]) -> bool:
    return all(
        user.op != "output" and (owner[user].name in on_ipu or owner[user].is_size)
        for user in node.users
    )


def _check_range(node: fx.Node, tensor: Tensor) -> None:
    if tensor.numel():
        low, high = (int(limit) for limit in torch.aminmax(tensor))
        if low < _LIMITS.min or high > _LIMITS.max:
            wrong = low if low < _LIMITS.min else high
            raise _out_of_range(node, wrong)


def _out_of_range(node: fx.Node, value: object) -> ValueError:
    return ValueError(
        f"node {name_of(node)!r} has the value {value}, which does not go into int32; place what "
        "reads it on the host (excluded_nodes)"
    )


def apply(draft: Draft, narrowing: Narrowing) -> None:
    """Insert casts at the borders, and narrow the operators on IPUs."""
    groups = draft.groups()
    on_ipu = {group.name for group in groups if draft.placement.on_ipu(group.name)}
    added: list[str] = []
    for node in narrowing.tensors:
        draft.tensors[node] = draft.tensors[node].to(_NEW)
        node.meta["val"] = with_dtype(node.meta["val"], _NEW)
    for source, name in narrowing.entries.items():
        added.append(name)
        _narrow_entry(draft, source, name, on_ipu)
    for group in groups:
        if group.name in on_ipu:
            for node in group_nodes(group):
                _narrow(node)
    _widen_exits(draft, narrowing, added)
    devices = {**draft.placement.devices, **dict.fromkeys(added, HOST)}
    draft.placement = replace(draft.placement, devices=devices)


def _narrow_entry(draft: Draft, source: fx.Node, name: str, on_ipu: set[str]) -> None:
    """Insert a cast after a value of the host; after all placeholders, if it is one."""
    inputs = {node: f"input {name!r}" for name, node in draft.inputs.items()}
    calls = (node for node in draft.graph.nodes if node.op not in ("placeholder",))
    before = next(calls) if source.op == "placeholder" else source.next
    readers = [user for user in source.users if user.op != "output" and name_of(user) in on_ipu]
    with draft.graph.inserting_before(before):
        what = inputs.get(source, f"node {name_of(source)!r}")
        value = with_dtype(source.meta["val"], _NEW)
        entry = insert_call(draft.graph, to_int32, source, what, name=name, value=value, cast=True)
    for reader in readers:
        reader.replace_input_with(source, entry)


def _narrow(node: fx.Node) -> None:
    """Let a node on an IPU take and give 32-bit integers."""
    tensors = [source for source in node.all_input_nodes if dtype_of(source) == _NEW]
    if dtype_of(node) == _OLD or tensors:
        for number in scalars(node):
            if isinstance(number, int) and not _LIMITS.min <= number <= _LIMITS.max:
                raise _out_of_range(node, number)
    if short_name(node.target) in _NARROW:
        change_dtype(node, _OLD, _NEW)
        return
    for source in tensors:
        take_as(node, source, _OLD)
    if dtype_of(node) == _OLD:
        give_as(node, _NEW)


def _widen_exits(draft: Draft, narrowing: Narrowing, added: list[str]) -> None:
    wide: dict[fx.Node, fx.Node] = {}
    for source, group, name in narrowing.exits:
        value = _narrow_value(source)
        if group is not None:
            first = next(node for node in group.nodes if value in node.all_input_nodes)
            with draft.graph.inserting_before(first):
                back = cast(draft.graph, value, _OLD, name)
            for node in group.nodes:
                node.replace_input_with(value, back)
        else:
            with draft.graph.inserting_before(draft.graph.output_node()):
                back = cast(draft.graph, value, _OLD, name)
            wide[source] = back
            for output, node in draft.outputs.items():
                if node is source and name == f"{output}/CastInsertion_0":
                    draft.outputs[output] = back
        added.append(name)
    draft.graph.output_node().args = (tuple(draft.outputs.values()),)


def _narrow_value(node: fx.Node) -> fx.Node:
    """The node with the narrow value: itself, or if it gives 64 bits, the cast after it."""
    if dtype_of(node) == _NEW:
        return node
    return next(user for user in node.users if dtype_of(user) == _NEW and _is_same(user, node))


def _is_same(user: fx.Node, node: fx.Node) -> bool:
    return name_of(user) == name_of(node) and short_name(user.target) == "_to_copy"


@dataclass(frozen=True, slots=True)
class NarrowInt64:
    """The pass."""

    name: ClassVar[str] = "NarrowInt64"
    int64_to_int32_conversion: bool = False

    def __call__(self, draft: Draft) -> bool:
        """Rewrite `draft` in place; return whether anything changed."""
        if not self.int64_to_int32_conversion:
            return False
        before = len(draft.graph.nodes)
        apply(draft, plan(draft))
        return len(draft.graph.nodes) != before
