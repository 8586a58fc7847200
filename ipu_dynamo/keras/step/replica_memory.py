"""Hold the values of each replica: states and metrics that a step assigns."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.keras.private.stateless_names import tensor_of
from ipu_dynamo.keras.replica_values import reduce_state
from ipu_dynamo.keras.settings.enumerations import ReplicatedMetricReductionMethod
from ipu_dynamo.keras.step.step_variables import StepVariable


class ReplicaMemory:
    """The values of variables on all replicas, which the programs of a model share.

    The host's value is a reduction of these and no copy, so that no `DualView` can compare them.

    Invariant: after `publish` a variable holds the value that the host shall see. Later writes to
    it are the host's own, and the next `take` copies them to all replicas.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._held: dict[int, tuple[Any, Tensor, Tensor, int]] = {}

    def tensor(self, variable: StepVariable) -> Tensor:
        """The values of a variable, with a leading dimension over replicas."""
        present = tensor_of(variable.variable)
        known = self._held.get(id(variable.variable))
        if known is None or known[1] is not present:
            values = present.detach().expand(self.replicas, *present.shape).clone()
            known = variable.variable, present, values, present._version
            self._held[id(variable.variable)] = known
        return known[2]

    def take(self, variables: Sequence[StepVariable]) -> None:
        """Copy the host's assignments to all replicas."""
        for variable in variables:
            values = self.tensor(variable)
            owner, present, _, version = self._held[id(variable.variable)]
            if present._version != version:
                values.copy_(present.detach().expand_as(values))
                self._held[id(owner)] = owner, present, values, present._version

    def publish(
        self, variables: Sequence[StepVariable], method: ReplicatedMetricReductionMethod
    ) -> None:
        """Show the host the metrics as they are reduced, of other states those of replica 0."""
        with torch.no_grad():
            for variable in variables:
                owner, present, values, _ = self._held[id(variable.variable)]
                if variable.role == "metric":
                    shown = reduce_state(method, values.unbind(0))
                else:
                    shown = values[0]
                present.copy_(shown)
                self._held[id(owner)] = owner, present, values, present._version
