"""Sum the elements of the loss: to differentiate the sum is to differentiate every element.

Before   %l: f32[n] = aten.mse_loss(%x: f32[n], %y: f32[n], 0)
         capture.loss = %l
After    the same
         %s: f32[] = aten.sum(%l)
         capture.loss = %s
Keeps    the graph's other operators. A loss that is a number stays.
Source   PopTorch user guide, "poptorch.identity_loss", with the reduction "none".
"""

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.kit import GraphPass


class SumLoss(GraphPass):
    """The pass."""

    level = "traced"
    needed = "autograd differentiates one number"

    def rewrite(self, capture: Traced) -> bool:
        loss = capture.loss
        if loss is None or loss.meta["val"].dim() == 0:
            return False
        graph = capture.graph.graph
        with graph.inserting_before(graph.output_node()):
            capture.loss = call(graph, aten.sum.default, loss, origin=loss)
        return True
