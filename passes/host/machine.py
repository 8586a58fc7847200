"""Say for whom host passes decide: this computer, and what it was told of the program."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.tune.figures import Figures


@dataclass(frozen=True)
class Machine:
    """What runs a program here.

    Args:
        engine: its name: it compiles functions, or runs them operator by operator.
        devices: one for all IPUs, or one for each; none: functions are left on their device.
        own_tensors: nobody writes a program's tensors without their version counters' notice, as a
            user can with `weight.data`.
        figures: to decide by; None: those of this machine.
        hyperparameters: hyperparameters of the updates that a call will probably have.
    """

    engine: str = "eager"
    devices: Sequence[torch.device] = ()
    hyperparameters: Hyperparameters = ()
    own_tensors: bool = False
    figures: Figures | None = None

    @property
    def compiles(self) -> bool:
        """Whether functions are compiled."""
        return self.engine == "inductor"
