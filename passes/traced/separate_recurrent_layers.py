"""Call several recurrent layers with dropout between them one by one, in Dynamo's graphs.

Before   %y, %h = torch.gru(%x, %h0, [...], num_layers=2, dropout=p, train=True, ...)
After    %y, %h = recurrent_layers("gru", %x, %h0, [...], num_layers=2, dropout=p, train=True, ...)
Keeps    values and random numbers as eager PyTorch computes and draws them; source lines.
Source   PyTorch's decomposition of several layers forgets the dropout; see `recurrent_dropout.py`,
         which does the same while a module is traced.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.capture.recurrent_dropout import separate_layers
from ipu_dynamo.passes.levels import Level


@dataclass(frozen=True)
class SeparateRecurrentLayers:
    """The pass, on a graph and those of its checkpoints."""

    name: ClassVar[str] = "SeparateRecurrentLayers"
    level: ClassVar[Level] = "traced"
    needed: ClassVar[str] = "PyTorch would forget the dropout between layers"

    def __call__(self, capture: Capture) -> bool:
        modules = [m for m in capture.graph.modules() if isinstance(m, fx.GraphModule)]
        separated = [separate_layers(node) for m in modules for node in m.graph.nodes]
        if any(separated):
            for module in modules:
                module.recompile()
        return any(separated)
