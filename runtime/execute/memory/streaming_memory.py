"""Hold in host memory what leaves the IPUs, and count the bytes of every transfer; count too what
replicas get from each other."""

from typing import NamedTuple

import torch
from torch import Tensor

from ipu_dynamo.ops.private.locks import fork_safe_lock
from ipu_dynamo.program import Traffic

_HOST = torch.device("cpu")


class Kept(NamedTuple):
    """A value in streaming memory, and the device it came from."""

    tensor: Tensor
    device: torch.device


class StreamingMemory:
    """The memory beside the IPUs of all replicas.

    Invariant: `traffic` is what all transfers so far have moved. IPUs that are this machine's
    processor share its memory, so a transfer to or from them copies nothing. Nor does one between
    replicas: the shards of a variable lie one behind the other in one tensor.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._lock = fork_safe_lock()

    def store(self, value: Tensor) -> Kept:
        """Store a value that leaves its IPU, and return its copy."""
        self._count(Traffic(stored=value.nbytes))
        return Kept(value.to(_HOST), value.device)

    def load(self, kept: Kept, device: torch.device | None = None) -> Tensor:
        """The value on `device`; None: on the one it came from."""
        self._count(Traffic(loaded=kept.tensor.nbytes))
        return kept.tensor.to(kept.device if device is None else device)

    def fetch(self, variable: Tensor, shards: int = 1) -> None:
        """Bring a variable, or a replica's shard of it, to the chip. It lies in host memory all
        the time."""
        self._count(Traffic(loaded=_shard(variable, shards)))

    def write_back(self, variable: Tensor, shards: int = 1) -> None:
        """Take a variable, or a replica's shard of it, off the chip again, changed."""
        self._count(Traffic(stored=_shard(variable, shards)))

    def gather(self, variable: Tensor, shards: int) -> None:
        """Give a replica the shards of a variable that others have."""
        self._count(Traffic(gathered=(shards - 1) * _shard(variable, shards)))

    def scatter(self, value: Tensor, shards: int) -> None:
        """Count the bytes that other replicas add to a replica's shard of a sum."""
        self._count(Traffic(scattered=(shards - 1) * _shard(value, shards)))

    def _count(self, moved: Traffic) -> None:
        with self._lock:  # workers move values side by side
            self.traffic += moved


def _shard(tensor: Tensor, shards: int) -> int:
    """Bytes of one of the shards of a tensor; the last one is padded."""
    return -(-tensor.numel() // shards) * tensor.element_size()
