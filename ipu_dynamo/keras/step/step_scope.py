"""Hold the values of variables while a step is traced, and what assignments make of them.

An assignment is what it is in eager Keras: no gradient goes through it. One to a trained variable
becomes the value that the gradient is taken at, and the update goes on from.
"""

from collections.abc import Callable
from typing import Any

import torch
from keras import StatelessScope
from torch import Tensor

from ipu_dynamo.keras.private.stateless_names import mapping_of

AssignWeight = Callable[[Any], Tensor]


class StepScope(StatelessScope):  # type: ignore[misc]
    """A scope of a step.

    Args:
        mapping: the values of all variables, by identity.
        weights: identities of the variables that the step has as parameters.
        assign_weight: takes one of these variables, which is to be assigned, and gives the
            parameter; raises where that is impossible.
    """

    def __init__(
        self, mapping: dict[int, Tensor], weights: frozenset[int], assign_weight: AssignWeight
    ) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        mapping_of(self).update(mapping)
        self._weights, self._assign_weight = weights, assign_weight

    def assigned(self, variable: Any, value: Tensor) -> Tensor:
        """What a variable holds once `value` was assigned to it."""
        if id(variable) not in self._weights:
            return value.detach()
        return _AtValue.apply(self._assign_weight(variable), value.detach())  # type: ignore[no-any-return, no-untyped-call]

    def add_update(self, update: Any) -> None:
        variable, value = update
        super().add_update((variable, self.assigned(variable, value)))


class _AtValue(torch.autograd.Function):
    """A value whose gradient is that of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
