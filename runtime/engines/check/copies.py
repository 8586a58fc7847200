"""Copy tensors so that copies share memory, overlap and have strides as the tensors do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of some memory.

    Args:
        tensors: all that were given; those in other memory are themselves.
        memory: that of the tensors, and its copy.
    """

    tensors: list[Tensor]
    memory: list[tuple[torch.UntypedStorage, torch.UntypedStorage]]

    def write_back(self) -> None:
        """Write the copies back to the memory."""
        for own, copy in self.memory:
            own.copy_(copy)


def copies_of(tensors: Sequence[Tensor], of: Iterable[int]) -> Copies:
    """Return copies of the memory of the tensors at some positions."""
    memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    for place in of:
        storage = tensors[place].untyped_storage()
        if storage.data_ptr() not in memory:
            memory[storage.data_ptr()] = storage, storage.clone()
    copied = []
    for tensor in tensors:
        held = memory.get(tensor.untyped_storage().data_ptr())
        copied.append(tensor if held is None else _within(held[1], tensor))
    return Copies(copied, list(memory.values()))


def _within(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    return tensor.set_(storage, like.storage_offset(), like.shape, like.stride())
