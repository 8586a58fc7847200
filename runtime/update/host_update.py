"""Give gradients to an optimiser that runs in Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ipu_dynamo.runtime.update.gradient_scale import GradientScale

# Makes a step with the gradients of parameters, by name. They have a leading dimension over groups
# of replicas if there are several.
HostStepper = Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class HostGradients:
    """The gradients of an update.

    Args:
        totals: by parameter, the sums of every group of replicas.
        grouped: parameters that have groups.
        scale: their divisor; None for 1.
    """

    totals: Mapping[str, Sequence[Tensor]]
    grouped: frozenset[str]
    scale: GradientScale | None

    def divided(self) -> dict[str, Tensor]:
        """The gradients as the optimiser gets them, in memory of their own."""
        if self.scale is not None:
            self.scale.follow()
        found = {}
        for name, totals in self.totals.items():
            value = torch.stack(list(totals)) if name in self.grouped else totals[0].clone()
            found[name] = value if self.scale is None else value.div_(self.scale.tensor)
        return found


class HostUpdate:
    """All updates of a step: `prepare` divides the gradients, `write` makes the step."""

    def __init__(self, step: HostStepper) -> None:
        self.parts: list[HostGradients] = []
        self._step = step
        self._gradients: dict[str, Tensor] = {}

    def prepare(self) -> None:
        self._gradients = {n: g for part in self.parts for n, g in part.divided().items()}

    def write(self) -> None:
        gradients, self._gradients = self._gradients, {}
        self._step(gradients)
