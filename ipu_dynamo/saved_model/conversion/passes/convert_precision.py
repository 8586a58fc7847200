"""Let operators compute in float16 instead of float32, or the other way round.

Before   %y: f32 = aten.add(%x: f32, %w: f32); %z: f32 = aten.mul(%y, %w2)    result
After    %c: f16 = aten._to_copy(%x)  "add/CastInsertion_0"; %y: f16 = aten.add(%c, %w: f16)
         %d: f32 = aten._to_copy(%y)  "mul/CastInsertion_0"; %z: f32 = aten.mul(%d, %w2)
Keeps    types of inputs and results, integers, values up to rounding.
Source   IPU TensorFlow Addons, "IPU SavedModel CLI": precision_mode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, fx

from ipu_dynamo.saved_model.conversion.drafts.draft import Draft
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup, owners
from ipu_dynamo.saved_model.conversion.passes.change_dtype import (
    cast,
    change_dtype,
    dtype_of,
    group_nodes,
)
from ipu_dynamo.saved_model.conversion.passes.edit import (
    external_inputs,
    matches,
    read_instead,
    with_dtype,
)
from ipu_dynamo.saved_model.exported.node_names import Kind

_MODES = {"FP16": (torch.float32, torch.float16), "FP32": (torch.float16, torch.float32)}


@dataclass(frozen=True, slots=True)
class Conversion:
    """The decision: which groups compute in another type, and which tensors are held in it."""

    groups: frozenset[str]
    tensors: frozenset[fx.Node]


def plan(draft: Draft, old: torch.dtype, excluded: tuple[str, ...]) -> Conversion:
    """Decide which groups are converted. Reads the draft, changes nothing."""
    groups = draft.groups()
    owner = owners(groups)
    fixed = {owner[node].name for node in draft.outputs.values()}
    converted = frozenset(
        group.name
        for group in groups
        if group.is_matched
        and not group.is_size
        and group.name not in fixed
        and not matches(group.name, excluded)
        and old in {dtype_of(node) for node in [*group.nodes, *external_inputs(group)]}
    )
    tensors = frozenset(
        node
        for node in draft.tensors
        if dtype_of(node) == old
        and all(
            user.op != "output" and (owner[user].name in converted or owner[user].is_size)
            for user in node.users
        )
    )
    return Conversion(converted, tensors)


def apply(draft: Draft, conversion: Conversion, old: torch.dtype, new: torch.dtype) -> None:
    """Change types, and put casts between groups that differ."""
    groups = draft.groups()
    was_old = {
        node: dtype_of(node) == old for group in groups for node in group.nodes
    }  # before anything changes
    inputs = {group.name: external_inputs(group) for group in groups}
    for node in conversion.tensors:
        draft.tensors[node] = saturated(draft.tensors[node], new)
        node.meta["val"] = with_dtype(node.meta["val"], new)
    for group in groups:
        if group.kind is not Kind.OP or group.is_size:
            continue
        wanted = new if group.name in conversion.groups else old
        casts = _insert_casts(draft, group, inputs[group.name], wanted, was_old)
        read_instead(group, casts)
        if group.name in conversion.groups:
            for node in group_nodes(group):
                change_dtype(node, old, new)


def _insert_casts(
    draft: Draft,
    group: NodeGroup,
    sources: list[fx.Node],
    wanted: torch.dtype,
    was_old: Mapping[fx.Node, bool],
) -> dict[fx.Node, fx.Node]:
    """Insert casts of inputs whose type differs from that of the group, on the group's device."""
    casts: dict[fx.Node, fx.Node] = {}
    placement = draft.placement
    # a node whose type has changed is followed by a cast, which the group reads since then
    for index, source in enumerate(external_inputs(group)):
        if not was_old.get(sources[index], False) or dtype_of(source) == wanted:
            continue
        name = f"{group.name}/CastInsertion_{index}"
        first = next(node for node in group.nodes if source in node.all_input_nodes)
        with draft.graph.inserting_before(first):
            casts[source] = cast(draft.graph, source, wanted, name)
        devices = {**placement.devices, name: placement.devices[group.name]}
        ipus = dict(placement.ipus)
        if group.name in ipus:
            ipus[name] = ipus[group.name]
        placement = replace(placement, devices=devices, ipus=ipus)
    draft.placement = placement
    return casts


def saturated(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another type; finite values beyond its range are its limits."""
    limit = torch.finfo(dtype).max
    if tensor.dtype.itemsize <= dtype.itemsize:
        return tensor.to(dtype)
    clamped = torch.where(tensor.isfinite(), tensor.clamp(-limit, limit), tensor)
    return clamped.to(dtype)


@dataclass(frozen=True, slots=True)
class ConvertPrecision:
    """The pass."""

    name: ClassVar[str] = "ConvertPrecision"
    precision_mode: str | None = None
    excluded: tuple[str, ...] = ()

    def __call__(self, draft: Draft) -> bool:
        """Rewrite `draft` in place; return whether anything changed."""
        if self.precision_mode is None:
            return False
        old, new = _MODES[self.precision_mode]
        conversion = plan(draft, old, self.excluded)
        apply(draft, conversion, old, new)
        return bool(conversion.groups)
