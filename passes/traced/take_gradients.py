"""Take the gradients that a model takes in forward, where autograd runs for the program.

Before   %g = ipu.take_gradients([%energy], [%x], [], [%one], True, True)
After    the operators of the gradient, which are differentiated with the others
Keeps    values, and gradients of gradients.
Source   `torch.autograd.grad`.
"""

from typing import Any

from torch import Tensor, fx

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.marks.inner_gradients import take_gradients_op
from ipu_dynamo.ops.private.autograd_engine import differentiable_once


def take_gradients(args: tuple[Any, ...], node: fx.Node) -> list[Tensor]:
    """The gradients that a model takes in forward: those that a trace saw."""
    results, inputs, *_, create = args
    again = create and differentiable_once(results, inputs)
    gradients: list[Tensor] = take_gradients_op(*args)
    if len(gradients) == len(inputs) and not again:
        return gradients
    raise CompileError(
        "a gradient that the model takes in forward passes through a loop, a branch, a recurrent "
        "layer or a loss whose gradient has no gradient",
        node=node,
        hint="detach what it shall not depend on, or write that part in operators of PyTorch",
        id="gradient",
    )
