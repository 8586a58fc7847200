"""Refuse what programs cannot have, by name and line."""

import torch
from torch import Tensor, fx

from ipu_dynamo.errors import CompileError


def refuse_graphs_in_graphs(graph: fx.Graph) -> None:
    """Raise for operators that hold a graph of their own, such as `torch.cond`."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CompileError(
                f"operator {node.target} holds a graph or an effect of its own, which programs "
                f"cannot have yet",
                node=node,
                hint="replace it (torch.cond by torch.where), or leave it out of the model",
            )


def refuse_sparse(graph: fx.Graph) -> None:
    """Raise for sparse tensors, for instance the gradients of `nn.Embedding(sparse=True)`."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise CompileError(
                f"the result is a tensor of layout {value.layout}, and programs have dense ones",
                node=node,
                hint="use sparse=False, or a dense tensor",
            )
