"""Register operators of recurrent layers, their shapes, gradients and costs.

All take `x [steps, batch, inputs]` and the weights `wi [gates, inputs]` and `wh [gates, outputs]`
under these names. The one named `..._backward` computes the gradients of the one named `...`.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ipu_dynamo.ops.private.graphs import schema_of

_library = torch.library.Library("ipu", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Register the operator of a schema, which names no namespace.

    Args:
        run: computes it, by PyTorch's operators.
        shapes: takes the same, and gives empty tensors of the results' types.

    Returns:
        The operator `torch.ops.ipu.<name>.default`.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ipu::{name}", shapes, lib=_library)
    packet = getattr(torch.ops.ipu, name)
    register_flop_formula(packet)(_flops_of(packet.default))
    return packet.default


def define_gradient(
    operator: Any, setup: Callable[..., None], gradients: Callable[..., Sequence[Any]]
) -> None:
    """Let an operator be differentiated.

    Args:
        setup: keeps the arguments and results of a call that `gradients` reads.
        gradients: takes the context and gradients of the results, None for those that nothing
            reads; gives those of the first arguments. The others have none.
    """

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.set_materialize_grads(False)  # else unread states add zeros to the graph
        setup(ctx, inputs, output)

    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        of_arguments = [*gradients(ctx, *of_results)]
        of_arguments += [None] * (len(wanted) - len(of_arguments))
        return tuple(g if w else None for g, w in zip(of_arguments, wanted, strict=True))

    name = operator.name()
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_library)


def empty_gradients(
    x: Tensor,
    states: Sequence[Tensor],
    wi: Tensor,
    wh: Tensor,
    *,
    of_x: bool = True,
    of_weights: bool = True,
) -> tuple[Tensor, ...]:
    """Tensors like the gradients of `x`, the states, both weights and a bias; without elements
    where they are not wanted."""
    rows = wi.shape[0] if of_weights else 0
    sizes = (
        x.shape if of_x else (0, *x.shape[1:]),
        *(state.shape for state in states),
        (rows, wi.shape[1]),
        (rows, wh.shape[1]),
        (rows,),
    )
    return tuple(x.new_empty(size) for size in sizes)


def _flops_of(operator: Any) -> Callable[..., int]:
    """How many additions and multiplications a call takes: those of the products with `wi`,
    `wh` and `wp` at each step; backward the gradients of both factors of each."""
    names = [argument.name for argument in schema_of(operator).arguments]
    each = 4 if operator.name().endswith("_backward") else 2

    def flops(*shapes: Any, **named: Any) -> int:
        shape = dict(zip(names, shapes, strict=False)) | named
        steps, batch, _ = shape["x"]
        gates, inputs = shape["wi"]
        weights = gates * (inputs + shape["wh"][1]) + prod(shape.get("wp") or (0,))
        return int(each * steps * batch * weights)

    return flops
