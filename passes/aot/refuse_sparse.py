"""Refuse sparse tensors, for instance the gradients of `nn.Embedding(sparse=True)`.

Before   %s = aten.to_sparse(%x: f32[n])
After    raise CompileError("sparse")
Keeps    the graph.
Source   programs have dense tensors only.
"""

import torch
from torch import Tensor

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.errors import CompileError
from ipu_dynamo.passes.kit import Pass


class RefuseSparse(Pass):
    """The pass."""

    level = "joint"

    def __call__(self, capture: Joint) -> bool:
        for node in capture.graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.layout is not torch.strided:
                raise CompileError(
                    f"the result is a tensor of layout {value.layout}, and programs have dense "
                    f"ones",
                    node=node,
                    hint="use sparse=False, or a dense tensor",
                    id="operator",
                )
        return False
