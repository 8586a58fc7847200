"""Put every operator on the IPU that no expression excludes.

Before   a draft without a placement
After    a device for each group of operators, and none for sizes. Operators with numbers that
         depend on data are on the host, since only tensors are sent to an IPU
Keeps    the graph.
Source   IPU TensorFlow Addons, "IPU SavedModel CLI": excluded_nodes, no_ipu_placement.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ipu_dynamo.saved_model.conversion.drafts.draft import HOST, IPU, Draft, Placement
from ipu_dynamo.saved_model.conversion.drafts.node_groups import (
    NodeGroup,
    depends_on_data,
    gives_tensor,
)
from ipu_dynamo.saved_model.conversion.passes.edit import matches
from ipu_dynamo.saved_model.exported.node_names import Kind


def plan(groups: tuple[NodeGroup, ...], excluded: tuple[str, ...], none: bool) -> Placement:
    """Decide where every group of operators is.

    Raises:
        ValueError: one on the IPU takes or gives a tensor of a size that depends on values.
    """
    placed = [group for group in groups if group.kind is Kind.OP and not group.is_size]
    devices = {
        group.name: HOST
        if none or matches(group.name, excluded) or not gives_tensor(group) or _takes_number(group)
        else IPU
        for group in placed
    }
    for group in placed:
        if devices[group.name] != IPU:
            continue
        gives = [node.meta.get("val") for node in group.nodes]
        if depends_on_data(gives) or depends_on_data(_taken(group)):
            verb = "has" if depends_on_data(gives) else "reads"
            raise ValueError(
                f"node {group.name!r} ({group.operator}) {verb} a size that only computing tells, "
                "which no IPU has: place it on the host (excluded_nodes)"
            )
    return Placement(devices, {name: 0 for name, device in devices.items() if device == IPU})


def _takes_number(group: NodeGroup) -> bool:
    """Whether a group reads a number that data tell, as `count.item()`."""
    return any(not isinstance(x, Tensor) and depends_on_data(x) for x in _taken(group))


def _taken(group: NodeGroup) -> list[Any]:
    return [source.meta.get("val") for node in group.nodes for source in node.all_input_nodes]


@dataclass(frozen=True, slots=True)
class PlaceNodes:
    """The pass."""

    name: ClassVar[str] = "PlaceNodes"
    excluded_nodes: tuple[str, ...] = ()
    no_ipu_placement: bool = False

    def __call__(self, draft: Draft) -> bool:
        """Write the placement; return whether it has changed."""
        placement = plan(draft.groups(), self.excluded_nodes, self.no_ipu_placement)
        changed = placement != draft.placement
        draft.placement = placement
        return changed
