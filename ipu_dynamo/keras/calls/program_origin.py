"""Say what a program was traced with, to notice that a model is no longer that."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ipu_dynamo.keras.private.stateless_names import (
    compiled_objects,
    config_of,
    inner_optimizers,
    tensor_of,
)
from ipu_dynamo.keras.step.step_variables import Kind, StepVariable
from ipu_dynamo.keras.step.update import optimizer_states


@dataclass(frozen=True, eq=False)
class ProgramOrigin:
    """What a program is only right for.

    Args:
        objects: those that `compile` makes; compared by identity, as tensors are.
        tensors: that hold the variables.
        roles: of the variables: a layer that is frozen changes them.
        configs: of the optimiser and those in it: constants of the update.
    """

    objects: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    roles: tuple[str, ...]
    configs: tuple[Any, ...]

    def is_same(self, other: "ProgramOrigin") -> bool:
        """Whether a program of this origin is right for a model that is `other` now."""
        return (
            _identical(self.objects, other.objects)
            and _identical(self.tensors, other.tensors)
            and self.roles == other.roles
            and self.configs == other.configs
        )


def origin_of(model: Any, kind: Kind, variables: Sequence[StepVariable]) -> ProgramOrigin:
    """What a model is now.

    Args:
        variables: of its step.
    """
    held = [v.variable for v in variables]
    configs: tuple[Any, ...] = ()
    if kind == "fit":
        held += optimizer_states(model.optimizer, variables).values()
        configs = tuple(config_of(one) for one in inner_optimizers(model.optimizer))
    return ProgramOrigin(
        compiled_objects(model) if kind != "predict" else (),
        tuple(tensor_of(variable) for variable in held),
        tuple(v.role for v in variables),
        configs,
    )


def _identical(first: Sequence[Any], second: Sequence[Any]) -> bool:
    same_length = len(first) == len(second)
    return same_length and all(a is b for a, b in zip(first, second, strict=True))
