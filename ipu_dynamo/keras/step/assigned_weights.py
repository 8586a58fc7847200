"""Let a step assign weights that it trains, as SpectralNormalization does in `fit`.

The gradient is taken at the assigned value, and the update goes on from it, as in plain Keras. It
reaches the update as the gradient of a *receiver*: a parameter of zeros, which is multiplied by the
value, and added to the loss.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.errors import CompileError
from ipu_dynamo.keras.step.machine_shape import CallShape
from ipu_dynamo.keras.step.step_variables import Kind, Names, StepVariable
from ipu_dynamo.keras.step.tracing import running_layer

Receivers = dict[StepVariable, str]  # the name of each variable's receiver in the program


def receivers_of(variables: Sequence[StepVariable], assigned: Collection[int]) -> Receivers:
    """The receivers of a step.

    Args:
        assigned: identities of Keras' variables that the step assigns.
    """
    names = Names("")
    for variable in variables:
        names.of(variable.name.replace(".", "/"))
    return {
        variable: names.of(f"{variable.name}_assigned".replace(".", "/"))
        for variable in variables
        if variable.role == "trained" and id(variable.variable) in assigned
    }


def received(receiver: Tensor, value: Tensor) -> Tensor:
    """Zero, whose gradient by the receiver is `value`."""
    return (receiver * value.detach()).sum().float()


def check_assignment(variable: StepVariable, kind: Kind, shape: CallShape | None) -> None:
    """Refuse to assign a weight where steps would not see what plain Keras sees.

    Raises:
        CompileError: with the layer.
    """
    why = _why_not(variable, kind, shape)
    if why is None:
        return
    problem, hint = why
    layer: Any = running_layer()
    who = "the model" if layer is None else f"layer {layer.name} ({type(layer).__name__})"
    path = variable.variable.path
    raise CompileError(f"{who} assigns {path}, a trainable variable, {problem}", hint=hint)


def _why_not(variable: StepVariable, kind: Kind, shape: CallShape | None) -> tuple[str, str] | None:
    if kind != "fit":
        return f"in {kind}", "assign it in training only, or make it with trainable=False"
    if variable.role != "trained":
        return "which this optimizer does not train", "call compile again"
    if shape is not None and shape.accumulation > 1:
        problem = (
            f"and an update takes {shape.accumulation} micro-batches, which all begin with the "
            "value that the update before has left"
        )
        return problem, "train it without gradient accumulation"
    if shape is not None and shape.replicas > 1:
        problem = f"and each of {shape.replicas} replicas would have a value of its own"
        return problem, "train it on one replica"
    return None


def zeros_like(tensor: Tensor) -> torch.nn.Parameter:
    """A receiver for the values of a variable with this tensor."""
    return torch.nn.Parameter(torch.zeros_like(tensor))
