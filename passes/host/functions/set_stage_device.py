"""Make a function one for the torch device of its IPU; one that several call becomes several.

Before   %z = aten.zeros([2], device=device(type='cuda', index=0)), on an IPU that is cuda:1
After    %z = aten.zeros([2], device=device(type='cuda', index=1))
Keeps    operators, shapes, layouts, source lines. A copy to another device stays a copy.
Source   PyTorch: an operator's tensors, and those it makes, are on one device.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.tracing import fake_mode_of, pytree
from ipu_dynamo.options.devices import devices_of_ipus
from ipu_dynamo.passes.host.functions.rewrite_functions import copy_of, named, with_functions
from ipu_dynamo.passes.levels import Level
from ipu_dynamo.program import Function, HostProgram, make_function


@dataclass(frozen=True)
class SetStageDevice:
    """The pass. `devices`: one for all IPUs, or one for each."""

    name: ClassVar[str] = "SetStageDevice"
    level: ClassVar[Level] = "host"
    needed: ClassVar[str] = "stages would make tensors on another device than their IPU's"

    devices: tuple[torch.device, ...]

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        if not self.devices:
            return False
        program, changed = host.inlined, False
        of_ipus = devices_of_ipus(self.devices, program.num_ipus)
        made: dict[tuple[str, torch.device], Function] = {}
        for call in program.calls:
            key = call.function, of_ipus[call.ipu]
            if key not in made:
                function = named(program, call.function)
                if _differs(function.graph, of_ipus[call.ipu]):
                    module, changed = copy_of(function.graph), True
                    set_device(module, of_ipus[call.ipu])
                    function = make_function(function.name, module)
                made[key] = function
        if not changed:
            return False
        calls = {id(call): made[call.function, of_ipus[call.ipu]] for call in program.calls}
        return replace(host, inlined=with_functions(program, calls))


def _differs(gm: fx.GraphModule, device: torch.device) -> bool:
    """Whether a graph has a tensor on another device, or makes one there."""
    found = [(node.args, node.kwargs, node.meta["val"]) for node in gm.graph.nodes]
    leaves = (
        leaf.device if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(found)
    )
    return any(isinstance(leaf, torch.device) and leaf != device for leaf in leaves)


def set_device(gm: fx.GraphModule, device: torch.device) -> bool:
    """Make a function's graph one for `device`; say whether anything changed."""
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
