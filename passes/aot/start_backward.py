"""Begin the backward pass with a constant.

Before   %t: f32[] = tangent
         %g = aten.expand(%t, [4])
After    %s: f32[] = aten.full([], 1.0, dtype=torch.float32, device=torch.device("cpu"))
         %g = aten.expand(%s, [4])
         %s  with meta["ipu.backward"] = True and meta["ipu.start"] = True
         del %t
Keeps    all other operators; the source line is that of what reads it.
Source   PyTorch's autograd: the gradient of the loss with respect to itself is 1, times the loss
         scale.
"""

from ipu_dynamo.capture.capture import BACKWARD, STAGE, START, Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.node_meta import CUSTOM
from ipu_dynamo.passes.aot.annotate_stages import annotated_stage
from ipu_dynamo.passes.kit import GraphPass


class StartBackward(GraphPass):
    """The pass. `start` is the constant."""

    level = "joint"
    needed = "nobody else gives the gradient of the loss"

    start: float = 1.0

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        tangents = [n for n, role in capture.roles().items() if role.kind == "tangent"]
        for node in tangents:
            value = node.meta["val"]
            first = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(first):
                begin = graph.call_function(
                    aten.full.default,
                    (list(value.shape), self.start),
                    {"dtype": value.dtype, "device": value.device},
                )
            begin.meta = {"val": value, BACKWARD: True, START: True}
            reader = next(iter(node.users), None)
            if reader is not None:
                kept = (CUSTOM, "stack_trace")
                begin.meta |= {key: reader.meta[key] for key in kept if key in reader.meta}
                if (stage := annotated_stage(reader)) is not None:
                    begin.meta[STAGE] = stage
            node.replace_all_uses_with(begin)
        capture.remove_inputs(tangents)
        return bool(tangents)
