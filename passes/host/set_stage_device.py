"""Make a stage's graph one for the torch device of its IPU.

Before   %z = aten.zeros([2], device=device(type='cuda', index=0)), on an IPU that is cuda:1
After    %z = aten.zeros([2], device=device(type='cuda', index=1))
Keeps    operators, shapes, layouts, source lines. A copy to another device stays a copy.
Source   PyTorch: an operator's tensors, and those it makes, are on one device.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.tracing import fake_mode_of, pytree
from ipu_dynamo.options.devices import devices_of_ipus
from ipu_dynamo.passes.levels import Level, Partitioned


@dataclass(frozen=True)
class SetStageDevice:
    """The pass. `devices`: one for all IPUs, or one for each."""

    name: ClassVar[str] = "SetStageDevice"
    level: ClassVar[Level] = "parts"
    needed: ClassVar[str] = "stages would make tensors on another device than their IPU's"

    devices: tuple[torch.device, ...]

    def __call__(self, partitioned: Partitioned) -> bool:
        if not self.devices:
            return False
        of_ipus = devices_of_ipus(self.devices, max(partitioned.capture.ipus.values()) + 1)
        changed = [set_device(part.graph, of_ipus[part.ipu]) for part in partitioned.parts]
        return any(changed)


def set_device(gm: fx.GraphModule, device: torch.device) -> bool:
    """Make a part's graph one for `device`; say whether anything changed."""
    changed = False

    def here(value: Any) -> Any:
        nonlocal changed
        if isinstance(value, torch.device) and value != device:
            changed = True
            return device
        if isinstance(value, Tensor) and value.device != device:
            changed = True
            with fake_mode_of([value]):
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                )
        return value

    for node in gm.graph.nodes:
        node.args = pytree.tree_map_only(torch.device, here, node.args)
        node.kwargs = pytree.tree_map_only(torch.device, here, node.kwargs)
        node.meta["val"] = pytree.tree_map_only(Tensor, here, node.meta["val"])
    if changed:
        gm.recompile()
    return changed
