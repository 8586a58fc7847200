"""Give the block markers of Dynamo's graph the form in which passes know them.

Before   torch.ops.ipu.begin_block("encoder", 1)   # a packet of overloads
         %h = aten.relu(%x: f32[n])
         torch.ops.ipu.end_block()
After    ipu.begin_block("encoder", 1)
         %h = aten.relu(%x)
         ipu.end_block()
Keeps    every operator and its order. A marker inside a checkpoint, or alone in the graph, is
         refused.
Source   PyTorch's Dynamo, which records the calls of the user's Python.
"""

import torch
from torch import fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.marks.markers import begin_block, end_block
from ipu_dynamo.passes.kit import Pass

_MARKERS = {torch.ops.ipu.begin_block: begin_block, torch.ops.ipu.end_block: end_block}


def markers_of(graph: fx.Graph) -> list[fx.Node]:
    """The block markers, in order."""
    return [node for node in graph.nodes if node.target in _MARKERS.values()]


class ReadBlockMarkers(Pass):
    """The pass."""

    level = "traced"
    acts_on = (*_MARKERS, *_MARKERS.values())
    needed = "blocks would not be seen"

    def __call__(self, capture: Traced) -> bool:
        gm = capture.graph
        changed = False
        for module in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
            for node in module.graph.nodes:
                if node.target in _MARKERS:
                    node.target = _MARKERS[node.target]
                    node.meta.setdefault("val", None)
                    changed = True
            if module is not gm:
                _refuse_inside(module.graph)
        _refuse_alone(gm.graph)
        return changed


def _refuse_inside(graph: fx.Graph) -> None:
    for marker in markers_of(graph):
        raise CompileError(
            "a block begins or ends inside a checkpoint, a condition or another operator that "
            "holds a graph of its own",
            node=marker,
            hint="put the block around the whole of it",
        )


def _refuse_alone(graph: fx.Graph) -> None:
    markers = markers_of(graph)
    if not markers or any(n.op.startswith("call") and n not in markers for n in graph.nodes):
        return
    name = markers[0].args
    block = f"block {name[0]!r} begins" if name else "a block ends"
    raise CompileError(
        f"{block} right before a graph break, so what it holds would run outside the program",
        node=markers[0],
        hint="compile with fullgraph=True to see why PyTorch breaks the graph inside the block",
    )
