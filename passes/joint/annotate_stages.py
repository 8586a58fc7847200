"""Carry stages through AOTAutograd, which copies meta["custom"] to every node that it makes.

Before   %h: stage 1                                the graph that goes in, placed
After    %h: stage 1; %g: stage 1, backward         the graphs that come out
Keeps    the graphs; other entries of meta["custom"].
Source   PyTorch's `torch.fx.traceback.annotate`, which uses the same key.
"""

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Capture

_KEY = "ipu_stage"  # key of node.meta["custom"]
_NOTE = "Gradient addition node"  # autograd writes it behind the source line of such a sum


def write_stage(node: fx.Node, stage: int) -> None:
    """Make AOTAutograd copy `stage` to what it makes of `node`."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _KEY: stage}


def write_stages(graph: fx.Graph) -> None:
    """Do so for every node that has a stage."""
    for node in graph.nodes:
        if STAGE in node.meta:
            write_stage(node, node.meta[STAGE])


def read_stages(capture: Capture) -> bool:
    """The pass: write direction and stage, where known, to the nodes' own keys.

    Sums of gradients get no stage, nor do forward operators that a backward program repeats:
    `place_gradients` puts both where they are read.
    """
    for node in capture.graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        backward = node.meta.get("partitioner_tag") == "is_backward"
        repeated = capture.alone == "backward" and not backward
        node.meta[BACKWARD] = backward or repeated
        stage = (node.meta.get("custom") or {}).get(_KEY)
        if stage is not None and not node.meta.get("is_gradient_acc") and not repeated:
            node.meta[STAGE] = stage
        if _NOTE in (node.meta.get("stack_trace") or ""):
            node.meta["stack_trace"] = node.meta["stack_trace"].partition(_NOTE)[0]
    return True
