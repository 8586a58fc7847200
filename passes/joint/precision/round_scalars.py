"""Round Python numbers that meet half-precision tensors, as PyTorch's operators do on the CPU.

Before   %y = aten.add(%x: f16[n], 0.3)
After    %y = aten.add(%x, 0.300048828125)         # the float16 nearest to 0.3
Keeps    the graph; eager results, bit for bit. Inductor would compute with the exact number.
Source   PyTorch 2.13: these kernels convert their scalar to the tensor's type before they compute.
"""

from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import GraphPass

_HALVES = (torch.float16, torch.bfloat16)
_ROUNDING = frozenset(
    {
        aten.add.Scalar,
        aten.add.Tensor,
        aten.pow.Tensor_Scalar,
        aten.rsub.Scalar,
        aten.sub.Scalar,
        aten.sub.Tensor,
    }
)


class RoundScalars(GraphPass):
    """The pass."""

    level = "joint"
    acts_on = _ROUNDING

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return contents.halves and super().applies(capture, contents)

    def plan(self, graph: fx.Graph) -> list[tuple[fx.Node, tuple[Any, ...]]]:
        """New arguments for every operator that has a number to round. Reads the graph only."""
        changes = []
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.target in _ROUNDING and isinstance(value, Tensor) and value.dtype in _HALVES:
                rounded = tuple(_rounded(argument, value.dtype) for argument in node.args)
                if rounded != tuple(node.args):
                    changes.append((node, rounded))
        return changes

    def apply(self, graph: fx.Graph, change: tuple[fx.Node, tuple[Any, ...]]) -> None:
        node, arguments = change
        node.args = arguments


def _rounded(argument: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(argument, dtype=dtype).item() if isinstance(argument, float) else argument
