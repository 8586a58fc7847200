"""Say for whom host passes decide: this computer, and what it was told of the program."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ipu_dynamo.program.fused import Numbers


@dataclass(frozen=True)
class Machine:
    """What runs a program here.

    Args:
        engine: its name: it compiles functions, or runs them operator by operator.
        devices: one for all IPUs, or one for each; none: functions are left on their device.
        numbers: hyperparameters of the updates that a call will probably have.
    """

    engine: str = "eager"
    devices: Sequence[torch.device] = ()
    numbers: Numbers = ()

    @property
    def compiles(self) -> bool:
        """Whether functions are compiled."""
        return self.engine == "inductor"
