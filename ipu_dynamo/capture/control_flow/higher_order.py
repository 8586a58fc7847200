"""Record `torch.cond`, `while_loop`, `scan` and `map` as loops and branches of our own.

PyTorch's operators hold graphs as modules and compile the called functions with Dynamo first. A
scan has wrong gradients when Inductor compiles it. So while a model is traced, this file records
the calls of these operators. Integers that a `while_loop` carries become tensors.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.capture.control_flow.trace_control_flow import trace_branch, trace_loop, trace_while
from ipu_dynamo.capture.private.subgraphs import (
    cond_op,
    is_tracing,
    map_impl,
    operators_replaced,
    quote_body,
    scan,
    scan_op,
    while_loop_op,
)
from ipu_dynamo.capture.private.tracing import flatten, pytree
from ipu_dynamo.errors import CompileError, called_from


def higher_order_recorded() -> AbstractContextManager[None]:
    """While entered, this thread's calls are recorded."""
    return operators_replaced(
        {cond_op: _cond, while_loop_op: _while_loop, scan_op: _scan, map_impl: _map}
    )


def for_loop(count: int, body: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Call `body` `count` times, each time with the results of the call before.

    In a program it is one operator, whose size does not grow with the count. `body` gets its
    inputs by value: in-place changes of them stay within the call.

    Args:
        count: how often, 0 or more; a Python number.
        body: takes as many tensors as there are inputs; returns a tensor, a list or a tuple of as
            many of the same shapes and dtypes. It may read other tensors.
        inputs: the tensors for the first iteration.

    Returns:
        The results of the last iteration; copies of the inputs, if `count` is 0.

    Source: PopTorch user guide, "poptorch.for_loop".
    """
    if torch.compiler.is_dynamo_compiling():
        return _scan_of_nothing(count, body, inputs)
    if is_tracing():
        _, results = trace_loop(body, inputs, (), (), count)
        return list(results)
    values = [tensor.clone() for tensor in inputs]
    for _ in range(count):
        values = _listed(body(*values))
        if len(values) != len(inputs):
            raise CompileError(
                f"the body of a loop returns {len(values)} tensors, and gets {len(inputs)}",
                where=called_from(),
                hint="return one tensor for each input",
                id="control-flow",
            )
    return values


def cond(
    predicate: Tensor,
    then: Callable[..., Any],
    then_inputs: Sequence[Tensor],
    otherwise: Callable[..., Any],
    otherwise_inputs: Sequence[Tensor],
) -> list[Tensor]:
    """Call one of two functions, by the value of one bool.

    In a program it is one operator; both functions are traced, and one runs. Neither changes a
    tensor from outside.

    Args:
        predicate: one bool.
        then: takes the tensors of `then_inputs`; called if `predicate` is true.
        then_inputs: a sequence of tensors.
        otherwise: takes the tensors of `otherwise_inputs`; returns as many tensors as `then`, of
            the same shapes and dtypes.
        otherwise_inputs: a sequence of tensors.

    Returns:
        The result of the function that ran (a tensor, list or tuple), as a list.

    Source: PopTorch user guide, "poptorch.cond".
    """

    def one() -> list[Tensor]:
        return _listed(then(*_by_value(then_inputs)))

    def other() -> list[Tensor]:
        return _listed(otherwise(*_by_value(otherwise_inputs)))

    if torch.compiler.is_dynamo_compiling():
        return list(torch.cond(predicate, one, other, ()))
    if is_tracing():
        quote_body(then)
        quote_body(otherwise)
        return trace_branch(predicate, one, other)[1]
    return one() if predicate else other()


def _by_value(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _scan_of_nothing(
    count: int, body: Callable[..., Any], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """The same in a form that Dynamo captures as one operator."""

    def step(carried: list[Tensor], _: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return [value.clone() for value in _listed(body(*_by_value(carried)))], []

    results, _ = scan(step, list(inputs), torch.zeros(count, 0))
    return list(results)


def _cond(
    pred: Tensor, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()
) -> Any:
    quote_body(true_fn)
    quote_body(false_fn)
    leaves, spec = flatten(tuple(operands))

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: function(*pytree.tree_unflatten(tensors, spec))

    out, results = trace_branch(pred, of(true_fn), of(false_fn), leaves)
    return pytree.tree_unflatten(results, out)


def _while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Tensor | int],
    additional_inputs: Sequence[Tensor] = (),
    **_: object,
) -> Any:
    device = next((x.device for x in carried_inputs if isinstance(x, Tensor)), None)
    carried = [
        x if isinstance(x, Tensor) else torch.full((), x, device=device) for x in carried_inputs
    ]
    spec, results = trace_while(cond_fn, body_fn, carried, additional_inputs)
    return pytree.tree_unflatten(results, spec)


def _scan(
    combine_fn: Callable[..., Any],
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    additional_inputs: Sequence[Tensor] = (),
) -> Any:
    count = xs[0].shape[0]
    spec, results = trace_loop(combine_fn, init, xs, additional_inputs, count)
    return pytree.tree_unflatten(results, spec)


def _map(f: Callable[..., Any], xs: Sequence[Tensor], args: Sequence[Tensor] = ()) -> Any:
    spec, results = trace_loop(f, (), xs, args, xs[0].shape[0])
    return pytree.tree_unflatten(results, spec)
