"""Cut the joint graph into a forward and a backward graph.

With     results=1
Before   %y = aten.relu(%x: f32[n])  in forward
         %g = aten.threshold_backward(%tangents_1: f32[n], %y, 0)  in backward
         return (%y, %g)
After    def forward(%x: f32[n]):
             %y = aten.relu(%x)  in forward
             return (%y, %y)  with meta["desc"] = [None, SavedForBackwardsAOTOutput(0)]
         def backward(%y: f32[n], %t: f32[n]):
             %y  in backward  with meta["partitioner_tag"] = "is_forward"
             %g = aten.threshold_backward(%t, %y, 0)  in backward
             return (%g,)  with meta["desc"] = [None]
         Directions(forward, backward)
Keeps    values, stages and source lines. Forward operators that backward repeats have no stage any
         more: `AssignGradientStages` puts them where they are read.
Source   PyTorch's functorch: `min_cut_rematerialization_partition`, `default_partition`.
"""

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Joint
from ipu_dynamo.capture.private.aot import Cutting, cut_directions
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.graph_queries import may_draw
from ipu_dynamo.ops.private.node_meta import TAG, direction_tag
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Directions


class SplitDirections(Pass):
    """The pass.

    Args:
        cutting: whether backward repeats cheap operators of forward (`minimum`), or reads all that
            forward has computed (`none`).
        results: how many of the graph's results are forward's.
        lasting: which inputs are the same tensors in every call.
    """

    level = "joint"
    needed = "autograd calls forward and backward one by one"

    cutting: Cutting = "minimum"
    results: int = 0
    lasting: tuple[int, ...] = ()

    def __call__(self, capture: Joint) -> Directions:
        for node in capture.graph.graph.nodes:
            if BACKWARD in node.meta:
                node.meta.setdefault(TAG, direction_tag(node.meta[BACKWARD]))
        graphs = cut_directions(capture.graph, self.results, self.lasting, self.cutting)
        forward, backward = graphs
        for node in backward.graph.nodes:
            if node.meta.get(BACKWARD) is False:
                if may_draw(node):
                    raise CompileError(
                        "a memory budget makes the backward pass draw other random numbers than "
                        "the forward pass",
                        node=node,
                        hint="use torch.utils.checkpoint in place of activation_memory_budget",
                    )
                node.meta[BACKWARD] = True
                node.meta.pop(STAGE, None)
        return Directions(forward, backward)
