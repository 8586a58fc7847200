"""Differentiate branches: a branch of both gradients, whose kept values share places.

Source: the chain rule; PyTorch's AOTAutograd gives the gradient of each body.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.capture.control_flow.trace_control_flow import ControlFlow
from ipu_dynamo.ops.bodies import Body
from ipu_dynamo.ops.control_flow import branch_op
from ipu_dynamo.passes.traced.control_flow.call_operators import (
    call_operator,
    gradients_of,
    type_of,
    zeros_of,
)
from ipu_dynamo.passes.traced.control_flow.cut_body import BodyGradient, cut_body
from ipu_dynamo.passes.traced.control_flow.functional_bodies import Run, exported, functional
from ipu_dynamo.program import TensorType


@dataclass(frozen=True, eq=False)
class BranchGradient:
    """A branch that keeps values for its gradient, and that gradient.

    Args:
        forward: both branches; they return the results, and the kept values in the same places.
        backward: both gradients.
        results: how many the branch has.
        differentiable: numbers of the results with a gradient in any branch.
        gradients, read: numbers of the inputs that have gradients in any branch, and of those that
            any gradient reads.
    """

    flow: ControlFlow
    forward: tuple[Body, Body]
    backward: tuple[Body, Body]
    results: int
    differentiable: tuple[int, ...]
    gradients: tuple[int, ...]
    read: tuple[int, ...]


def branch_gradient(
    flow: ControlFlow, wanted: Sequence[bool], run_of: Callable[[Traced], Run]
) -> BranchGradient:
    """The gradient of a branch for the inputs where it is `wanted`; the first is the predicate.

    Args:
        run_of: how a captured body is run.
    """
    likes = [n.meta["val"] for n in flow.bodies[0].placeholder_nodes]
    asked = list(zip(likes, wanted[1:], strict=True))
    cuts = [cut_body(exported(run_of(body), asked), range(len(likes))) for body in flow.bodies]
    places, slots = _slots([cut.kept for cut in cuts])
    gradients = tuple(sorted({i for cut in cuts for i in cut.gradients}))
    tangents = tuple(sorted({i for cut in cuts for i in cut.tangents}))
    read = tuple(sorted({i for cut in cuts for i in cut.cut.read}))
    results = [node.meta["val"] for node in cuts[0].results]
    values = [*slots, *(likes[i] for i in read), *(results[i] for i in tangents)]

    def forward(cut: BodyGradient, places: Sequence[int]) -> Run:
        def run(*tensors: Tensor) -> list[Tensor]:
            values = fx.Interpreter(cut.cut.forward).run(*tensors)
            kept = dict(zip(places, values[len(results) :], strict=True))
            filled = [kept[n] if n in kept else _blank(slot) for n, slot in enumerate(slots)]
            return [*values[: len(results)], *filled]

        return run

    def backward(cut: BodyGradient, places: Sequence[int]) -> Run:
        def run(*tensors: Tensor) -> list[Tensor]:
            arguments = iter(tensors)
            kept = [next(arguments) for _ in slots]
            inputs = {i: next(arguments) for i in read}
            of_results = {i: next(arguments) for i in tangents}
            computed = gradients_of(cut, [kept[n] for n in places], inputs, of_results)
            return [computed[i] if i in computed else _blank(likes[i]) for i in gradients]

        return run

    pairs = list(zip(cuts, places, strict=True))
    ahead = [functional(forward(*pair), likes) for pair in pairs]
    back = [functional(backward(*pair), values) for pair in pairs]
    return BranchGradient(
        flow, (ahead[0], ahead[1]), (back[0], back[1]), len(results), tangents, gradients, read
    )


def _slots(kept: Sequence[Sequence[Tensor]]) -> tuple[list[list[int]], list[Tensor]]:
    """Assign places to kept values: each has one, of its type; branches share them."""
    slots: list[Tensor] = []
    places = []
    for values in kept:
        free = list(range(len(slots)))
        mine = []
        for value in values:
            type_ = TensorType.of(value)
            place = next((n for n in free if TensorType.of(slots[n]) == type_), len(slots))
            if place == len(slots):
                slots.append(value)
            else:
                free.remove(place)
            mine.append(place)
        places.append(mine)
    return places, slots


def _blank(like: Tensor) -> Tensor:
    return torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)


def differentiable_branch(plan: BranchGradient, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call a branch whose results have gradients."""
    return list(_Branch.apply(plan, *tensors))  # type: ignore[no-untyped-call]


class _Branch(torch.autograd.Function):
    """A branch, for autograd."""

    @staticmethod
    def forward(ctx: Any, plan: BranchGradient, *tensors: Tensor) -> tuple[Tensor, ...]:
        returned = call_operator(plan.flow, plan.forward, tensors)
        results, kept = returned[: plan.results], returned[plan.results :]
        ctx.plan, ctx.inputs = plan, len(tensors)
        ctx.results = [*map(type_of, results)]
        ctx.save_for_backward(tensors[0], *kept, *(tensors[1 + i] for i in plan.read))
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(results) if i not in plan.differentiable)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: BranchGradient = ctx.plan
        predicate, *saved = ctx.saved_tensors
        tangents = []
        for number in plan.differentiable:
            of = of_results[number]
            tangents.append(zeros_of(ctx.results[number]) if of is None else of)
        names = [body.name for body in plan.backward]
        returned = branch_op(predicate, [*saved, *tangents], *names)
        gradients: list[Tensor | None] = [None] * ctx.inputs
        for number, gradient in zip(plan.gradients, returned, strict=True):
            gradients[1 + number] = gradient
        return None, *gradients
