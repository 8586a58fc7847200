"""List the variables of a step, each once, with its name and role in the program."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import torch

from ipu_dynamo.errors import CompileError
from ipu_dynamo.keras.private.stateless_names import (
    tensor_of,
    trained_variables,
)

Kind = Literal["fit", "evaluate", "predict"]
Role = Literal["trained", "frozen", "state", "metric", "scale"]


@dataclass(frozen=True, eq=False)
class StepVariable:
    """A variable of Keras in a step.

    Args:
        name: in the program: parts of the path, joined by dots.
        role: `trained`: the optimiser updates it; `frozen`: a trainable variable that this step
            only reads; `state`: the model's, or a seed's; `metric`; `scale`: a variable of the
            optimiser that the loss is multiplied by.
    """

    variable: Any
    name: str
    role: Role

    @property
    def is_parameter(self) -> bool:
        """Whether the module of the step holds it as a parameter."""
        return self.role in ("trained", "scale", "frozen")

    @property
    def tensor(self) -> torch.Tensor:
        """The memory that it has in Keras."""
        tensor: torch.Tensor = tensor_of(self.variable)
        return tensor


def step_variables(
    model: Any, kind: Kind, *, outside: Sequence[Any] = ()
) -> tuple[StepVariable, ...]:
    """All variables that a step of this kind may read.

    Args:
        outside: variables that a step uses, and the model does not have: states of seed generators
            and of recurrent layers, and variables of a loss, a regulariser or an activation.
    """
    names = Names(model.name)
    found: dict[int, StepVariable] = {}

    def add(variables: Iterable[Any], role: Role, prefix: str = "") -> None:
        for variable in variables:
            if id(variable) not in found:
                name = names.of(prefix + variable.path)
                found[id(variable)] = StepVariable(variable, name, role)

    if kind == "fit":
        trained = {id(v) for v in trained_variables(model.optimizer) if v.trainable}
        add((v for v in model.trainable_variables if id(v) in trained), "trained")
    add(model.trainable_variables, "frozen")
    add(model.non_trainable_variables, "state")
    if kind != "predict":
        add(model.metrics_variables, "metric")
    add(outside, "state")
    if kind == "fit":
        add(scale_variables(model.optimizer), "scale")
    return tuple(found.values())


def scale_variables(optimizer: Any) -> list[Any]:
    """The optimiser's variables that `scale_loss` reads.

    Raises:
        CompileError: one is no floating-point number, so it has no gradient that would let the
            update change it.
    """
    with _ReadingScope() as scope:
        optimizer.scale_loss(keras.ops.ones(()))
    variables = [v for v in optimizer.variables if id(v) in scope.read]
    for variable in variables:
        if not tensor_of(variable).dtype.is_floating_point:
            raise CompileError(
                f"{optimizer.name} scales the loss by {variable.path}, which is {variable.dtype}",
                hint="keep the factor as a variable of floating point",
            )
    return variables


class _ReadingScope(keras.StatelessScope):  # type: ignore[misc]
    """A scope that notes which variables are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def get_current_value(self, variable: Any) -> Any:
        self.read.add(id(variable))
        return super().get_current_value(variable)


class Names:
    """Unique names for paths of variables."""

    def __init__(self, model_name: str) -> None:
        self._prefix = f"{model_name}/"
        self._taken: set[str] = set()

    def of(self, path: str) -> str:
        """A unique name of words joined by dots, which is also not the beginning of another."""
        words = [re.sub(r"\W", "_", part) or "_" for part in self._short(path).split("/")]
        words = [f"_{word}" if word[0].isdigit() else word for word in words]
        base, number = ".".join(words), 0
        while self._clashes(name := f"{base}_{number}" if number else base):
            number += 1
        self._taken.add(name)
        return name

    def _short(self, path: str) -> str:
        return path.removeprefix(self._prefix) or path

    def _clashes(self, name: str) -> bool:
        return any(
            name == other or other.startswith(f"{name}.") or name.startswith(f"{other}.")
            for other in self._taken
        )
