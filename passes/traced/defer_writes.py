"""Write variables once in a step, behind its last micro-batch, where a model asks for that.

Before   ipu.write_at_step_end(%m, %v);  %y = aten.mm(%x, %m)
After    %w = ipu.accumulation_weight();  %l = aten.lt(%w, 0.4);  %n = aten.where(%l, %v, %m)
         %y = aten.mm(%x, %m);  aten.copy_(%m, %n)                       three micro-batches a step
Keeps    every other operator. Who reads %m in a step reads what it was before the step.
Source   the operator ExpMovAvg of published programs for PopTorch: a teacher follows its student
         from update to update, and not from micro-batch to micro-batch.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.ops.marks.step_end import accumulation_weight_op, write_at_step_end_op
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.levels import Level

aten = torch.ops.aten


@dataclass(frozen=True)
class DeferWrites:
    """The pass, behind Placement: a write stays on the stage where the model asks for it.

    Args:
        accumulation: micro-batches of a step.
    """

    name: ClassVar[str] = "DeferWrites"
    level: ClassVar[Level] = "traced"
    needed: ClassVar[str] = "the program has no operator that waits for the end of a step"

    accumulation: int = 1

    def __call__(self, capture: Capture) -> bool:
        graph = capture.graph.graph
        writes = list(graph.find_nodes(op="call_function", target=write_at_step_end_op))
        (output,) = graph.find_nodes(op="output")
        for write in writes:
            self._defer(graph, write, output)
        if writes:
            capture.graph.recompile()
        return bool(writes)

    def _defer(self, graph: fx.Graph, write: fx.Node, output: fx.Node) -> None:
        variable, value = write.args
        with graph.inserting_before(write):
            weight = call(graph, accumulation_weight_op, origin=write)
            # between the weights of the last micro-batch and the one before
            last = call(graph, aten.lt.Scalar, weight, 1 / (self.accumulation - 0.5), origin=write)
            new = call(graph, aten.where.self, last, value, variable, origin=write)
        with graph.inserting_before(output):
            call(graph, aten.copy_.default, variable, new, origin=write)
        graph.erase_node(write)
