"""Differentiate loops: a loop in reverse order, whose body reads each iteration's kept values.

Source: the chain rule; PyTorch's AOTAutograd gives the gradient of the body.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.capture.control_flow.trace_control_flow import ControlFlow
from ipu_dynamo.ops.bodies import Body
from ipu_dynamo.ops.control_flow import loop_op
from ipu_dynamo.passes.traced.control_flow.call_operators import (
    call_operator,
    gradients_of,
    type_of,
    zeros_of,
)
from ipu_dynamo.passes.traced.control_flow.cut_body import cut_body
from ipu_dynamo.passes.traced.control_flow.functional_bodies import Run, exported, functional


@dataclass(frozen=True, eq=False)
class LoopGradient:
    """A loop that keeps values for its gradient, and that gradient.

    Args:
        results: how many the loop has; after them it returns the kept values.
        differentiable: numbers of the results with a gradient.
        carried, summed, rows: numbers of the inputs whose gradients are carried, summed over
            iterations, or made row by row.
        stacked: numbers of stacked results whose gradients are read row by row.
        scanned, captured: numbers of the inputs that the gradient reads.
    """

    flow: ControlFlow
    forward: Body
    backward: Body
    results: int
    differentiable: frozenset[int]
    carried: tuple[int, ...]
    summed: tuple[int, ...]
    rows: tuple[int, ...]
    stacked: tuple[int, ...]
    scanned: tuple[int, ...]
    captured: tuple[int, ...]


def loop_gradient(
    flow: ControlFlow, wanted: Sequence[bool], run_of: Callable[[Traced], Run]
) -> LoopGradient:
    """Return the gradient of a loop for the `wanted` inputs, and for all carried values.

    Args:
        run_of: how a captured body is run.
    """
    (body,) = flow.bodies
    likes = [n.meta["val"] for n in body.placeholder_nodes]
    rows = range(flow.carried, flow.carried + flow.scanned)
    floats = [like.is_floating_point() or like.is_complex() for like in likes]
    asked = [
        is_float and (number < flow.carried or wanted[number])
        for number, is_float in enumerate(floats)
    ]
    joint = exported(run_of(body), list(zip(likes, asked, strict=True)))
    cut = cut_body(joint, range(rows.stop, len(likes)))
    again = [i for i in cut.cut.read if i < flow.carried]  # carried values change: keep them, too

    def forward(*tensors: Tensor) -> list[Tensor]:
        results_and_kept = fx.Interpreter(cut.cut.forward).run(*tensors)
        return [*results_and_kept, *(tensors[i] for i in again)]

    carried = tuple(i for i in range(flow.carried) if floats[i])
    summed = tuple(i for i in cut.gradients if i >= rows.stop)
    of_rows = tuple(i for i in cut.gradients if i in rows)
    stacked = tuple(i for i in cut.tangents if i >= flow.carried)
    scanned = tuple(i for i in cut.cut.read if i in rows)
    captured = tuple(i for i in cut.cut.read if i >= rows.stop)

    def backward(*tensors: Tensor) -> list[Tensor]:
        arguments = iter(tensors)
        of_carried = {i: next(arguments) for i in carried}
        sums = {i: next(arguments) for i in summed}
        of_stacked = {i: next(arguments) for i in stacked}
        kept = [next(arguments) for _ in cut.kept]
        inputs = {i: next(arguments) for i in (*again, *scanned, *captured)}
        gradients = gradients_of(cut, kept, inputs, {**of_carried, **of_stacked})
        return [
            *(gradients[i] if i in gradients else torch.zeros_like(of_carried[i]) for i in carried),
            *(sums[i] + gradients[i] for i in summed),
            *(gradients[i] for i in of_rows),
        ]

    values = [likes[i] for i in (*carried, *summed)]
    values += [cut.results[i].meta["val"] for i in stacked]
    values += cut.kept
    values += [likes[i] for i in (*again, *scanned, *captured)]
    ahead, back = functional(forward, likes), functional(backward, values)
    return LoopGradient(
        flow, ahead, back, len(cut.results),
        frozenset(cut.tangents), carried, summed, of_rows, stacked, scanned, captured,
    )  # fmt: skip


def differentiable_loop(plan: LoopGradient, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call a loop whose results have gradients."""
    return list(_Loop.apply(plan, *tensors))  # type: ignore[no-untyped-call]


class _Loop(torch.autograd.Function):
    """A loop, for autograd."""

    @staticmethod
    def forward(ctx: Any, plan: LoopGradient, *tensors: Tensor) -> tuple[Tensor, ...]:
        returned = call_operator(plan.flow, [plan.forward], tensors)
        results, kept = returned[: plan.results], returned[plan.results :]
        ctx.plan, ctx.inputs = plan, [*map(type_of, tensors)]
        ctx.results = [*map(type_of, results)]
        read = [tensors[i] for i in (*plan.scanned, *plan.captured)]
        ctx.save_for_backward(*kept, *read)
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(results) if i not in plan.differentiable)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: LoopGradient = ctx.plan
        saved = list(ctx.saved_tensors)
        captured = [saved.pop() for _ in plan.captured][::-1]
        tangents = [
            zeros_of(like) if of is None else of
            for of, like in zip(of_results, ctx.results, strict=True)
        ]
        carried = [tangents[i] for i in plan.carried] + [
            zeros_of(ctx.inputs[i]) for i in plan.summed
        ]
        scanned = [tangents[i] for i in plan.stacked] + saved
        returned = loop_op(carried, scanned, captured, plan.flow.count, plan.backward.name, True)
        gradients: list[Tensor | None] = [None] * len(ctx.inputs)
        for number, gradient in zip(
            (*plan.carried, *plan.summed, *plan.rows), returned, strict=True
        ):
            gradients[number] = gradient
        return None, *gradients
