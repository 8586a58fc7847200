"""Compute the tensors that a step makes of one number: functions hold no tensors.

Before   %c: f32[3] = the tensor [0.5, 0.5, 0.5]
After    %c: f32[3] = aten.full([3], 0.5)
Keeps    every result.
Source   functions of programs, which are pure and are saved as text.
"""

import torch

from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.capture.update.trace_step import HOST, UntraceableUpdate
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update.step_graphs import each_step
from ipu_dynamo.passes.update_levels import UpdateGraphs, UpdateStep


def _fill(step: UpdateStep) -> bool:
    module, graph = step.graph, step.graph.graph
    held = list(graph.find_nodes(op="get_attr"))
    for node in held:
        tensor = getattr(module, str(node.target)).detach()
        if not tensor.numel() or not bool((tensor == tensor.flatten()[0]).all()):
            raise UntraceableUpdate(
                f"the optimizer makes a tensor of the values {tensor.tolist()} in its step",
                hint=f"keep it in optimizer.state, or: {HOST}",
            )
        with graph.inserting_before(node):
            value = tensor.flatten()[0].item()
            full = graph.call_function(
                aten.full.default, (list(tensor.shape), value), {"dtype": tensor.dtype}
            )
        full.meta = dict(node.meta)
        if "val" not in full.meta:
            with fake_mode_of([next(iter(graph.nodes)).meta["val"]]):
                full.meta["val"] = torch.empty(tensor.shape, dtype=tensor.dtype)
        node.replace_all_uses_with(full)
        graph.erase_node(node)
    return bool(held)


class FillConstants(Pass):
    """The pass.

    Raises:
        UntraceableUpdate: the elements of a tensor differ.
    """

    level = "update"
    needed = "functions of a program hold no tensors"

    def __call__(self, update: UpdateGraphs) -> bool:
        return each_step(update, _fill)
