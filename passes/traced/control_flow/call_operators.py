"""Call the operator of a loop or branch, and hold the shared parts of its gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.control_flow.trace_control_flow import ControlFlow
from ipu_dynamo.ops.bodies import Body
from ipu_dynamo.ops.control_flow import branch_op, loop_op, while_loop_op
from ipu_dynamo.passes.traced.control_flow.cut_body import BodyGradient

GradientType = tuple[torch.Size, torch.dtype, torch.device]


def call_operator(
    flow: ControlFlow, bodies: Sequence[Body], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Call the operator, with these bodies."""
    carried, rest = list(tensors[: flow.carried]), tensors[flow.carried :]
    scanned, captured = list(rest[: flow.scanned]), list(rest[flow.scanned :])
    names = [body.name for body in bodies]
    results: list[Tensor]
    if flow.kind == "loop":
        results = loop_op(carried, scanned, captured, flow.count, *names)
    elif flow.kind == "while_loop":
        results = while_loop_op(carried, captured, *names)
    else:
        results = branch_op(carried[0], captured, *names)
    return results


def gradients_of(
    cut: BodyGradient,
    kept: Sequence[Tensor],
    inputs: dict[int, Tensor],
    tangents: dict[int, Tensor],
) -> dict[int, Tensor]:
    """Run the backward half of a body; return gradients by numbers of inputs."""
    arguments = [
        *kept,
        *(inputs[i] for i in cut.cut.read),
        *(tangents[i] for i in cut.tangents),
    ]
    gradients = fx.Interpreter(cut.cut.backward).run(*arguments)
    return dict(zip(cut.gradients, gradients, strict=True))


def zeros_of(like: GradientType) -> Tensor:
    """Return zeros in place of a missing gradient."""
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


def type_of(tensor: Tensor) -> GradientType:
    return tensor.shape, tensor.dtype, tensor.device
