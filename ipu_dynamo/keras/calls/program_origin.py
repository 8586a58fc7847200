"""Record the state of a model at its trace, to notice when the model has changed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ipu_dynamo.keras.calls.python_values import different, python_values
from ipu_dynamo.keras.private.stateless_names import (
    compiled_objects,
    tensor_of,
)
from ipu_dynamo.keras.step.step_variables import Kind, StepVariable
from ipu_dynamo.keras.step.update import optimizer_states


@dataclass(frozen=True, eq=False)
class ProgramOrigin:
    """The state of a model for which a program is right.

    Args:
        objects: those that `compile` makes; compared by identity, as tensors are.
        tensors: that hold the variables.
        roles: of the variables: a layer that is frozen changes them.
        values: of Python, which are constants of the program.
    """

    objects: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    roles: tuple[str, ...]
    values: Mapping[str, Any]

    def is_same(self, other: "ProgramOrigin", traced: Collection[str] = ()) -> bool:
        """Whether a program of this origin is right for a model that is `other` now.

        Args:
            traced: paths of values that may differ.
        """
        return (
            _identical(self.objects, other.objects)
            and _identical(self.tensors, other.tensors)
            and self.roles == other.roles
            and not different(self.values, other.values) - set(traced)
        )


def origin_of(
    model: Any, kind: Kind, variables: Sequence[StepVariable], outside: Iterable[Any] = ()
) -> ProgramOrigin:
    """The present state of a model.

    Args:
        variables: of its step.
        outside: as in `optimizer_states`.
    """
    held = [v.variable for v in variables]
    if kind == "fit":
        held += optimizer_states(model.optimizer, variables, outside).values()
    return ProgramOrigin(
        compiled_objects(model) if kind != "predict" else (),
        tuple(tensor_of(variable) for variable in held),
        tuple(v.role for v in variables),
        python_values(model, kind),
    )


def _identical(first: Sequence[Any], second: Sequence[Any]) -> bool:
    same_length = len(first) == len(second)
    return same_length and all(a is b for a, b in zip(first, second, strict=True))
