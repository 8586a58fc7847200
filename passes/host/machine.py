"""Describe the machine for which host passes decide: this computer and the user's settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.share import Share
from ipu_dynamo.tune.figures import Figures


@dataclass(frozen=True)
class Machine:
    """The machine that runs a program.

    Args:
        engine: its name: it compiles functions, or runs them operator by operator.
        devices: one for all IPUs, or one for each; none: functions are left on their device.
        own_tensors: the version counter of a program's tensor counts every write to it. A write
            through `weight.data` would not be counted.
        figures: to decide by; None: those of this machine.
        hyperparameters: hyperparameters of the updates that a call will probably have.
        share: its part of a program that runs on several ranks; None: all.
        constants: tensors of the program, by name; without them fewer equal values are found.
        memory: bytes of a device's memory that decide; None: those that are installed.
    """

    engine: str = "eager"
    devices: Sequence[torch.device] = ()
    hyperparameters: Hyperparameters = ()
    own_tensors: bool = False
    figures: Figures | None = None
    share: Share | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    memory: int | None = None

    @property
    def compiles(self) -> bool:
        """Whether functions are compiled."""
        return self.engine == "inductor"
