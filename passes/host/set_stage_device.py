"""Make a stage's graph one for the torch device of its IPU.

Before   %z = aten.zeros([2], device=device(type='cuda', index=0)), on an IPU that is cuda:1
After    %z = aten.zeros([2], device=device(type='cuda', index=1))
Keeps    operators, shapes, layouts, source lines. A copy to another device stays a copy.
Source   PyTorch: an operator's tensors, and those it makes, are on one device.
"""

from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.tracing import fake_mode_of, pytree


def retarget(graph: fx.Graph, device: torch.device) -> bool:
    """The pass, on one part's graph; returns whether anything changed."""
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

    for node in graph.nodes:
        node.args = pytree.tree_map_only(torch.device, here, node.args)
        node.kwargs = pytree.tree_map_only(torch.device, here, node.kwargs)
        node.meta["val"] = pytree.tree_map_only(Tensor, here, node.meta["val"])
    return changed
