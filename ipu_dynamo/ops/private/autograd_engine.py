"""Call autograd below the names that a trace replaces. Checked on PyTorch 2.13.0."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward, get_gradient_edge


def run_engine(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    *,
    retain: bool,
    create: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of results with respect to inputs; None for those that do not lead there."""
    gradients: tuple[Tensor | None, ...] = _engine_run_backward(
        tuple(results), tuple(tangents), retain, create, tuple(inputs), True, accumulate_grad=False
    )
    return gradients


def set_requires_grad(x: Tensor, required: bool) -> None:
    torch._C.TensorBase.requires_grad_(x, required)


# nodes of autograd whose gradients are operators without a gradient
_ONCE = frozenset({"_LoopBackward", "_BranchBackward"})
_ONCE_OPERATORS = "GeneratedBackwardFor_ipu_"


def differentiable_once(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether a loop, branch or operator of this project lies between results and inputs.

    Autograd says nothing where the gradient of such a gradient is asked for: it takes it as zero.
    """
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    leads: dict[Any, bool] = dict.fromkeys(ends, True)
    todo: list[Any] = [get_gradient_edge(result).node for result in results]
    once = []
    while todo:
        node = todo[-1]
        sources = [source for source, _ in node.next_functions if source is not None]
        waiting = [source for source in sources if source not in leads]
        if node not in leads and waiting:
            todo += waiting
            continue
        todo.pop()
        leads.setdefault(node, any(leads[source] for source in sources))
        if leads[node] and node not in ends:
            once.append(node.name() in _ONCE or node.name().startswith(_ONCE_OPERATORS))
    return any(once)
