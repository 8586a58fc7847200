"""Take the statistics of norms on halves in float32, and keep them so for the backward pass.

With     enabled=True
Before   %l = aten.native_layer_norm(%x: f16[m,n], [n], None, None, 0.1)
         %y = %l[0]
         %d = aten.native_layer_norm_backward(
             %g: f16[m,n], %x, [n], %l[1], %l[2], None, None, [True, False, False]
         )
         %z = %d[0]
         return (%y, %z)
After    %a = aten._to_copy(%x, dtype=torch.float32)
         %l = aten.native_layer_norm(%a, [n], None, None, 0.1)
         %y = aten._to_copy(%l[0], dtype=torch.float16)
         %mean: f32[m,1] = %l[1]
         %scale: f32[m,1] = %l[2]
         %b = aten._to_copy(%g, dtype=torch.float32)
         %d = aten.native_layer_norm_backward(
             %b, %a, [n], %mean, %scale, None, None, [True, False, False]
         )
         %a, %l, %b, %d  with meta["ipu.machine"] = "f16"
         %mean, %scale  with meta["ipu.machine"] = "f32"
         %z = aten._to_copy(%d[0], dtype=torch.float16)
Keeps    stages and source lines; results, but for what the rounded mean has cost. In float32
         PyTorch takes statistics by two passes or Welford's method already.
Source   PopTorch user guide, "poptorch.Options.enableStableNorm".
"""

import torch
from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.upcast import InFloat, is_half
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.program.machine_marks import MACHINE, in_dtype

_FORWARD = frozenset(
    {
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.no_stats,
        aten.native_group_norm.default,
        aten.native_layer_norm.default,
    }
)
_BACKWARD = frozenset(
    {
        aten.native_batch_norm_backward.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm_backward.default,
    }
)


class UpcastNorms(GraphPass):
    """The pass. `enabled`: whether to upcast."""

    level = "joint"

    enabled: bool

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return self.enabled and contents.halves

    def rewrite(self, capture: Joint) -> bool:
        norms = plan(capture.graph.graph) if self.enabled else []
        rewrite = InFloat.of(capture)
        for norm in norms:
            parts = list(norm.users) if norm.target in _FORWARD else []
            rewrite.rewrite(norm)
            for part in filter(is_half, parts):
                _let_read_unrounded(part, rewrite)
        if norms:
            capture.graph.graph.eliminate_dead_code()  # rounded statistics without readers
        return bool(norms)


def plan(graph: fx.Graph) -> list[fx.Node]:
    """The norms of halves and their backward passes, in graph order. Reads the graph only."""
    return [
        node
        for node in graph.nodes
        if node.target in _FORWARD | _BACKWARD and any(map(is_half, node.all_input_nodes))
    ]


def _let_read_unrounded(part: fx.Node, rewrite: InFloat) -> None:
    """Let the backward pass read a result before its rounding: on the machine it is float32."""
    (wide,) = part.all_input_nodes
    for reader in part.users:
        if reader.target in _BACKWARD:
            wide.meta[MACHINE] = in_dtype(None, torch.float32)
            rewrite.upcasts[part, reader.meta.get(STAGE), reader.meta.get(BACKWARD)] = wide
