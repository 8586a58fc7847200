"""Carry stages through AOTAutograd, which copies meta["custom"] to every node that it makes.

Before   %h = aten.relu(%x: f32[n])  in stage 1
After    %h = aten.relu(%x)  in stage 1  with meta["custom"] = {"ipu_stage": 1}
Keeps    the graph; other entries of meta["custom"]. If %h runs a graph, its nodes get the same.
Source   PyTorch's `torch.fx.traceback.annotate`, which uses the same key.
"""

from collections.abc import Iterator

from torch import fx

from ipu_dynamo.capture.capture import STAGE, Traced
from ipu_dynamo.ops.private.graphs import HigherOrderOperator
from ipu_dynamo.ops.private.node_meta import annotate, annotation
from ipu_dynamo.passes.kit import Pass

CUSTOM_STAGE = "ipu_stage"  # key of node.meta["custom"]


def annotated_stage(node: fx.Node) -> int | None:
    """Return the stage of the node that AOTAutograd made `node` from, if it has one."""
    stage: int | None = annotation(node, CUSTOM_STAGE)
    return stage


class AnnotateStages(Pass):
    """The pass."""

    level = "traced"
    needed = "stages would be lost in differentiation"

    def __call__(self, capture: Traced) -> bool:
        changed = False
        for node in capture.graph.graph.nodes:
            if STAGE not in node.meta:
                continue
            for each in (node, *_inside(capture.graph, node)):
                changed |= annotated_stage(each) != node.meta[STAGE]
                annotate(each, CUSTOM_STAGE, node.meta[STAGE])
        return changed


def _inside(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """Return the nodes in the graphs of a higher-order operator, such as a checkpoint."""
    if isinstance(node.target, HigherOrderOperator):
        for held in node.all_input_nodes:
            if held.op == "get_attr":
                for module in gm.get_submodule(str(held.target)).modules():
                    if isinstance(module, fx.GraphModule):
                        yield from module.graph.nodes
