"""Call recurrent layers as one operator for each layer and direction, in Dynamo's graphs.

Before   %y, %h = torch.gru(%x: f32[m,n,k], %s: f32[1,n,k], [%v: f32[3*k,k], %w: f32[3*k,k]],
                            False, 1, 0.0, True, False, False)
After    %y, %h = recurrent_layers("gru", %x, %s, [%v, %w], False, 1, 0.0, True, False, False)
Keeps    values and random numbers as eager PyTorch computes and draws them; source lines.
Source   `capture/layers/recurrent_layers.py`, which does the same while a module is traced.
"""

from torch import fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.capture.layers.recurrent_layers import LAYERS, call_recurrent_layers
from ipu_dynamo.passes.kit import Pass


class CallRecurrentLayers(Pass):
    """The pass, on a graph and those of its checkpoints."""

    level = "traced"
    acts_on = LAYERS
    needed = "PyTorch would take layers apart, and forget the dropout between them"

    def __call__(self, capture: Traced) -> bool:
        modules = [m for m in capture.graph.modules() if isinstance(m, fx.GraphModule)]
        called = [call_recurrent_layers(node) for m in modules for node in m.graph.nodes]
        if any(called):
            for module in modules:
                module.recompile()
        return any(called)
