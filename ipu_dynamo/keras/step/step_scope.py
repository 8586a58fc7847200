"""Hold the values of variables, and the results of assignments, while a step is traced.

As in eager Keras, an assignment has no gradient. One to a trained variable gives the value at which
the gradient is taken, and from which the update starts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from keras import StatelessScope
from torch import Tensor

from ipu_dynamo.keras.private.stateless_names import mapping_of, tensor_of
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

AssignWeight = Callable[[Any], Tensor]
Outside = Callable[[Any], Tensor | None]


@contextmanager
def outside_variables(
    outside: Outside, assigned: Callable[[Any], None] | None = None
) -> Iterator[None]:
    """Let scopes of this thread ask for the variables that they do not have.

    Args:
        outside: takes a variable, and gives its value; None: Keras' own tensor.
        assigned: takes each variable that is assigned.
    """
    original, add = StatelessScope.get_current_value, StatelessScope.add_update

    def current(scope: StatelessScope, variable: Any) -> Any:
        value = original(scope, variable)
        # one that the trace itself makes has no tensor yet
        return outside(variable) if value is None and tensor_of(variable) is not None else value

    def noted(scope: StatelessScope, update: Any) -> None:
        if assigned is not None:
            assigned(update[0])
        add(scope, update)

    with (
        replaced(StatelessScope, "get_current_value", in_this_thread(current, original)),
        replaced(StatelessScope, "add_update", in_this_thread(noted, add)),
    ):
        yield


class StepScope(StatelessScope):  # type: ignore[misc]
    """A scope of a step.

    Args:
        mapping: the values of all variables, by identity.
        weights: identities of the variables that the step has as parameters.
        assign_weight: takes one of these variables, which is to be assigned, and gives the
            parameter; raises where that is impossible.
        outside: as in `outside_variables`.
    """

    def __init__(
        self,
        mapping: dict[int, Tensor],
        weights: frozenset[int],
        assign_weight: AssignWeight,
        outside: Outside,
    ) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        mapping_of(self).update(mapping)
        self._weights, self._assign_weight = weights, assign_weight
        self._outside = outside

    def assigned(self, variable: Any, value: Tensor) -> Tensor:
        """The value of a variable after `value` was assigned to it."""
        if id(variable) not in mapping_of(self):
            self._outside(variable)
        if id(variable) not in self._weights:
            return value.detach()
        return _AtValue.apply(self._assign_weight(variable), value.detach())  # type: ignore[no-any-return, no-untyped-call]

    def add_update(self, update: Any) -> None:
        variable, value = update
        super().add_update((variable, self.assigned(variable, value)))


class _AtValue(torch.autograd.Function):
    """A value in place of a weight: the weight gets its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
