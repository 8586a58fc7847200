"""Write to each node of AOTAutograd's graph its direction, and the stage and memory it is given.

Before   %g = aten.relu(%x: f32[n])
         %g  with meta["partitioner_tag"] = "is_backward" and meta["custom"] = {"ipu_stage": 1}
After    %g = aten.relu(%x)  in stage 1, backward
Keeps    the graph. Sums of gradients get no stage: `AssignGradientStages` puts them where they are
         read.
Source   PyTorch's AOTAutograd, which tags the nodes of its joint graph.
"""

from typing import Any

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Joint
from ipu_dynamo.ops.marks.available_memory import PLANNED
from ipu_dynamo.ops.private.node_meta import (
    BACKWARD_TAG,
    GRADIENT_SUM,
    IS_GRADIENT_SUM,
    TAG,
    annotation,
)
from ipu_dynamo.passes.aot.annotate_stages import annotated_stage
from ipu_dynamo.passes.aot.keep_changed import after_tangents
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.traced.tag_convolution_groups import MEMORY_SHARE
from ipu_dynamo.program.text.graph_text import MEMORY


class ReadStages(Pass):
    """The pass."""

    level = "joint"
    needed = "every operator has to have a direction and a stage"

    def __call__(self, capture: Joint) -> bool:
        backward = after_tangents(capture.graph.graph)  # a user's own backward has no tags
        before = [_known(node) for node in capture.graph.graph.nodes]
        for node in capture.graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            node.meta.setdefault(BACKWARD, is_backward(node) or node in backward)
            stage = annotated_stage(node)
            if stage is not None and not node.meta.get(IS_GRADIENT_SUM):
                node.meta.setdefault(STAGE, stage)
            share = annotation(node, MEMORY_SHARE)
            if share is not None and node.target in PLANNED:
                node.meta[MEMORY] = float(share)
            if GRADIENT_SUM in (node.meta.get("stack_trace") or ""):
                node.meta["stack_trace"] = node.meta["stack_trace"].partition(GRADIENT_SUM)[0]
        return before != [_known(node) for node in capture.graph.graph.nodes]


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd made `node` for the backward pass."""
    return node.meta.get(TAG) == BACKWARD_TAG


def _known(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta.get(key) for key in (BACKWARD, STAGE, MEMORY, "stack_trace"))
