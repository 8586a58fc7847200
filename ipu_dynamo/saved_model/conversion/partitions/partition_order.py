"""Decide which groups of a draft make a partition, and in which order partitions run."""

from collections.abc import Sequence
from dataclasses import dataclass

from ipu_dynamo.saved_model.conversion.drafts.draft import HOST, IPU, Draft
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup


@dataclass(frozen=True, slots=True)
class Partition:
    """Groups that run together, in the order of data."""

    device: str
    nodes: tuple[str, ...]


def partitions(draft: Draft, *, merged: bool) -> tuple[Partition, ...]:
    """Partitions in the order in which they run; each reads only earlier ones.

    Args:
        merged: the host's groups come first, and all IPUs' groups are one partition; no group of
            the host reads one of an IPU then.
    """
    placed = [group for group in draft.groups() if group.name in draft.placement.devices]
    if merged:
        check_head(draft, "merge_subgraphs")
        placed.sort(key=lambda group: _turn(group, draft))
    runs: list[tuple[str, list[str]]] = []
    for group in placed:
        device = IPU if draft.placement.on_ipu(group.name) else HOST
        if not runs or runs[-1][0] != device:
            runs.append((device, []))
        runs[-1][1].append(group.name)
    return tuple(Partition(device, tuple(names)) for device, names in runs)


def _turn(group: NodeGroup, draft: Draft) -> int:
    """The order: first the host, then IPUs, and then casts of their results."""
    if draft.placement.on_ipu(group.name):
        return 1
    return 2 if any(map(draft.placement.on_ipu, group.reads)) else 0


def check_head(draft: Draft, option: str) -> None:
    """Raise ValueError if the host reads a result of an IPU.

    Args:
        option: the option that does not allow it.
    """
    if behind := host_behind_ipu(draft.groups(), draft):
        ipu, host = behind
        raise ValueError(
            f"{option} needs host nodes in front of all IPU nodes, and host node {host!r} reads "
            f"IPU node {ipu!r}: place {ipu!r} on the host as well (excluded_nodes)"
        )


def host_behind_ipu(groups: Sequence[NodeGroup], draft: Draft) -> tuple[str, str] | None:
    """An IPU's group and a group of the host that reads it, other than a conversion's cast."""
    devices = draft.placement.devices
    casts = {group.name: group for group in groups if group.is_cast}
    for group in groups:
        if devices.get(group.name) != HOST or group.is_cast:
            continue
        for read in group.reads:
            source = casts[read].reads[0] if read in casts else read
            if devices.get(source) == IPU:
                return source, group.name
    return None
