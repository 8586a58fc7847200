"""Number the phases of a phased program as PopTorch does.

Source: PopTorch user guide, "poptorch.Liveness": between two phases that compute lie as many
numbers as the transfers of activations need for themselves.
"""

from dataclasses import dataclass

from ipu_dynamo.options import Liveness, Strategy

_STRIDE: dict[Liveness, int] = {
    "always_live": 1,
    "off_chip_after_fwd": 1,
    "off_chip_after_fwd_no_overlap": 2,
    "off_chip_after_each_phase": 4,
}


@dataclass(frozen=True, slots=True)
class PhaseNumbers:
    """When the forward phases 0 to `count` - 1 and their backward phases run."""

    count: int
    liveness: Liveness = "always_live"
    separate_backward_phase: bool = False

    @classmethod
    def of(cls, strategy: Strategy) -> "PhaseNumbers":
        """The numbers of a phased strategy."""
        return cls(len(strategy.phases), strategy.liveness, strategy.separate_backward_phase)

    @property
    def stride(self) -> int:
        """From one phase that computes to the next."""
        return _STRIDE[self.liveness]

    @property
    def total(self) -> int:
        """PopTorch's setting for the number of forward phases, those for transfers included."""
        if self.liveness != "always_live":
            return self.forward(self.count - 1) + 1 + 3
        return self.forward(self.count - 1) + 1 + self.separate_backward_phase

    @property
    def joined(self) -> bool:
        """Whether the backward pass begins in the last forward phase."""
        return self.liveness == "always_live" and not self.separate_backward_phase

    def forward(self, phase: int) -> int:
        """The number of forward phase `phase`, from 0."""
        return phase * self.stride

    def backward(self, phase: int) -> int:
        """The number of the backward phase of forward phase `phase`; the last one's is first."""
        first = self.total - self.joined
        return first + (self.count - 1 - phase) * self.stride
