"""Write variables once in a step, after its last micro-batch, if a model asks for that.

With     accumulation=3
Before   %m: f32[n] = buffer
         ipu.write_at_step_end(%m, %v: f32[n])
         %y = aten.mul(%x: f32[n], %m)
After    %y = aten.mul(%x, %m)
         %w = ipu.accumulation_weight()
         %l = aten.lt(%w, 0.4)                     # so is that of the last of three micro-batches
         %n = aten.where(%l, %v, %m)
         aten.copy_(%m, %n)
Keeps    every other operator. Who reads %m in a step reads what it was before the step.
Source   the operator ExpMovAvg of published programs for PopTorch: a teacher follows its student
         from update to update, and not from micro-batch to micro-batch.
"""

import torch
from torch import fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import is_view
from ipu_dynamo.ops.marks.step_end import accumulation_weight_op, write_at_step_end_op
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.kit import GraphPass


class DeferWrites(GraphPass):
    """The pass, after Placement: a write stays on the stage where the model asks for it.

    Args:
        accumulation: micro-batches of a step.
    """

    level = "traced"
    acts_on = (write_at_step_end_op,)
    needed = "the program has no operator that waits for the end of a step"

    accumulation: int = 1

    def rewrite(self, capture: Traced) -> bool:
        graph = capture.graph.graph
        writes = list(graph.find_nodes(op="call_function", target=write_at_step_end_op))
        (output,) = graph.find_nodes(op="output")
        for write in writes:
            self._defer(graph, write, output)
        return bool(writes)

    def _defer(self, graph: fx.Graph, write: fx.Node, output: fx.Node) -> None:
        variable, value = write.args
        assert isinstance(variable, fx.Node)
        _refuse_other_shape(write)
        with graph.inserting_before(output):
            for result in output.all_input_nodes:  # it is returned as it was
                if _looks_at(result, variable):
                    same = call(graph, aten.clone.default, result, origin=result)
                    output.replace_input_with(result, same)
            weight = call(graph, accumulation_weight_op, origin=write)
            # between the weights of the last micro-batch and the one before
            last = call(graph, aten.lt.Scalar, weight, 1 / (self.accumulation - 0.5), origin=write)
            new = call(graph, aten.where.self, last, value, variable, origin=write)
            call(graph, aten.copy_.default, variable, new, origin=write)
        graph.erase_node(write)


def _looks_at(node: fx.Node, variable: fx.Node) -> bool:
    """Whether a value is a variable, or may be a view of one."""
    while node is not variable and node.all_input_nodes and is_view(node):
        node = node.all_input_nodes[0]
    return node is variable


def _refuse_other_shape(write: fx.Node) -> None:
    variable, value = (node.meta["val"] for node in write.args if isinstance(node, fx.Node))
    try:
        fits = torch.broadcast_shapes(variable.shape, value.shape) == variable.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise CompileError(
            f"a variable of shape {list(variable.shape)} cannot follow a value of shape"
            f" {list(value.shape)}",
            node=write,
            hint="give the value the variable's shape",
        )
