"""Put the nodes of IPUs on the IPUs that expressions name.

Before   every node of an IPU on IPU 0
After    each on the IPU of the last list that matches its name; casts with what reads them
Keeps    the graph; nodes of the host.
Source   IPU TensorFlow Addons, "IPU SavedModel CLI": manual_sharding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ipu_dynamo.saved_model.conversion.drafts.draft import Draft
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup
from ipu_dynamo.saved_model.conversion.passes.edit import matches

Shards = tuple[tuple[str, ...], ...]


def plan(
    groups: tuple[NodeGroup, ...], ipus: Mapping[str, int], shards: Shards
) -> Mapping[str, int]:
    """Decide the IPU of each group that is on one."""
    numbers = {}
    for group in groups:
        if group.name in ipus and group.is_matched:
            numbers[group.name] = max(
                (ipu for ipu, listed in enumerate(shards) if matches(group.name, listed)), default=0
            )
    readers = {read: group.name for group in groups for read in group.reads}
    for group in groups:
        if group.name in ipus and group.is_cast:
            numbers[group.name] = numbers.get(readers.get(group.name, ""), 0)
    return numbers


@dataclass(frozen=True, slots=True)
class ShardManually:
    """The pass."""

    name: ClassVar[str] = "ShardManually"
    manual_sharding: Shards = ()

    def __call__(self, draft: Draft) -> bool:
        """Write the IPUs into the placement; return whether it has changed."""
        if not self.manual_sharding:
            return False
        ipus = plan(draft.groups(), draft.placement.ipus, self.manual_sharding)
        changed = ipus != draft.placement.ipus
        draft.placement = replace(draft.placement, ipus=ipus)
        return changed
