"""Hold values that leave the IPUs in host memory, and count the bytes of every transfer.

Transfers between replicas are counted, too.
"""

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
    """The memory next to the IPUs of all replicas.

    Invariant: `traffic` counts all transfers so far. IPUs that are this machine's processor share
    its memory, so a transfer to or from them copies nothing. A transfer between replicas copies
    nothing, either: the shards of a variable are one after the other in one tensor.
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
        """Count a load of a variable, or of a replica's shard, to the chip.

        The variable is in host memory all the time.
        """
        self._count(Traffic(loaded=_shard(variable, shards)))

    def write_back(self, variable: Tensor, shards: int = 1) -> None:
        """Count the write of a changed variable, or of a replica's shard, off the chip again."""
        self._count(Traffic(stored=_shard(variable, shards)))

    def gather(self, variable: Tensor, shards: int) -> None:
        """Count the bytes of a variable's shards that a replica gets from the others."""
        self._count(Traffic(gathered=(shards - 1) * _shard(variable, shards)))

    def scatter(self, value: Tensor, shards: int) -> None:
        """Count the bytes that other replicas add to a replica's shard of a sum."""
        self._count(Traffic(scattered=(shards - 1) * _shard(value, shards)))

    def exchange(self, nbytes: int) -> None:
        """Give a replica the values of others."""
        self._count(Traffic(exchanged=nbytes))

    def _count(self, moved: Traffic) -> None:
        with self._lock:  # workers move values side by side
            self.traffic += moved


def _shard(tensor: Tensor, shards: int) -> int:
    """Bytes of one of the shards of a tensor; the last one is padded."""
    return -(-tensor.numel() // shards) * tensor.element_size()
