"""Make a function one for the torch device of its IPU; one that several call becomes several.

Before   %z = aten.zeros([2], device=device(type='cuda', index=0)), on an IPU that is cuda:1
After    %z = aten.zeros([2], device=device(type='cuda', index=1))
         in the bodies of loops and branches, too
Keeps    operators, shapes, layouts, source lines. A copy to another device stays a copy.
Source   PyTorch: an operator's tensors, and those it makes, are on one device.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.tracing import fake_mode_of, pytree
from ipu_dynamo.ops.bodies import Body, all_bodies, bodies_of
from ipu_dynamo.ops.control_flow import rename
from ipu_dynamo.options.devices import devices_of_ipus
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.extract import copy_of
from ipu_dynamo.passes.host.functions.rewrite_functions import with_functions
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import Function, HostProgram, make_function
from ipu_dynamo.program.ir.function import body_of


class SetStageDevice(Pass):
    """The pass. `devices`: one for all IPUs, or one for each."""

    level = "host"
    needed = "stages would make tensors on another device than their IPU's"

    devices: tuple[torch.device, ...]

    def applies(self, host: HostProgram, contents: Contents) -> bool:
        return bool(self.devices)

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        if not self.devices:
            return False
        program, changed = host.inlined, False
        of_ipus = devices_of_ipus(self.devices, program.num_ipus)
        functions: dict[tuple[str, torch.device], Function] = {}
        for call in program.calls:
            key = call.function, of_ipus[call.ipu]
            if key not in functions:
                function = program.function(call.function)
                if _differs(function.graph, of_ipus[call.ipu]):
                    module, changed = copy_of(function.graph), True
                    set_device(module, of_ipus[call.ipu])
                    function = make_function(function.name, module)
                functions[key] = function
        if not changed:
            return False
        calls = {
            number: [(call, functions[call.function, of_ipus[call.ipu]])]
            for number, call in program.numbered_calls().items()
        }
        return replace(host, inlined=with_functions(program, calls))


def _differs(gm: fx.GraphModule, device: torch.device) -> bool:
    """Whether a graph or a body in it has a tensor on another device, or makes one there."""
    graphs = [gm.graph, *(body.graph.graph for body in all_bodies(gm.graph))]
    values = [(n.args, n.kwargs, n.meta["val"]) for graph in graphs for n in graph.nodes]
    leaves = (
        leaf.device if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(values)
    )
    return any(isinstance(leaf, torch.device) and leaf != device for leaf in leaves)


def set_device(gm: fx.GraphModule, device: torch.device) -> bool:
    """Make a function's graph one for `device`; say whether anything changed."""
    changed = False

    def on_device(value: Any) -> Any:
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
        node.args = pytree.tree_map_only(torch.device, on_device, node.args)
        node.kwargs = pytree.tree_map_only(torch.device, on_device, node.kwargs)
        node.meta["val"] = pytree.tree_map_only(Tensor, on_device, node.meta["val"])
        bodies = bodies_of(node)
        moved = [_body_on(body, device) for body in bodies]
        if [body.name for body in moved] != [body.name for body in bodies]:
            rename(node, moved)
            changed = True
    if changed:
        gm.recompile()
    return changed


def _body_on(body: Body, device: torch.device) -> Body:
    """The body that computes the same on `device`; others may run `body`, so it stays."""
    module = copy_of(body.graph)
    return body_of(module) if set_device(module, device) else body
