"""Hold in host memory what leaves the IPUs, and count the bytes of every transfer."""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from ipu_dynamo.program import Traffic

_HOST = torch.device("cpu")


class Kept(NamedTuple):
    """A value in streaming memory, and the device it came from."""

    tensor: Tensor
    device: torch.device


class StreamingMemory:
    """The memory beside the IPUs of all replicas.

    Invariant: `traffic` is what all transfers so far have moved. IPUs that are this machine's
    processor share its memory, so a transfer to or from them copies nothing.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._lock = threading.Lock()

    def store(self, value: Tensor) -> Kept:
        """What is kept of a value that leaves its IPU."""
        self._count(Traffic(stored=value.nbytes))
        return Kept(value.to(_HOST), value.device)

    def load(self, kept: Kept, device: torch.device | None = None) -> Tensor:
        """The value on `device`; None: on the one it came from."""
        self._count(Traffic(loaded=kept.tensor.nbytes))
        return kept.tensor.to(kept.device if device is None else device)

    def fetch(self, variable: Tensor) -> None:
        """Bring a variable to the chip. It lies in host memory all the time."""
        self._count(Traffic(loaded=variable.nbytes))

    def write_back(self, variable: Tensor) -> None:
        """Take a variable off the chip again, changed."""
        self._count(Traffic(stored=variable.nbytes))

    def _count(self, moved: Traffic) -> None:
        with self._lock:  # workers move values side by side
            self.traffic += moved
