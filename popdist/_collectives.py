"""Exchange tensors between some processes.

Messages go from process to process in the default group, so that any set of instances may act
without the others. `torch.distributed.new_group` does not do: it names a group by how many a
process has, and instances that act in different sets have different numbers.
"""

import json
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_TAG = 0x706F70  # of all messages between two processes, which arrive in their order
Described = tuple[str, list[int]]  # dtype and shape of a tensor


def describe(
    operation: str, tensors: Sequence[Tensor], ranks: Sequence[int]
) -> dict[int, list[Described]]:
    """Give each of some processes the dtypes and shapes of the tensors of all, by rank.

    Args:
        operation: its name, which must be the same on all.
        ranks: these processes, this one included; [0] without a group.

    Raises:
        ValueError: some are in another operation.
    """
    own = json.dumps([operation, [(str(t.dtype), list(t.shape)) for t in tensors]])
    found = {rank: json.loads(text) for rank, text in _texts(own.encode(), ranks).items()}
    if len({operation for operation, _ in found.values()}) > 1:
        what = ", ".join(f"rank {rank} in {operation}" for rank, (operation, _) in found.items())
        raise ValueError(f"processes call different collectives: {what}")
    return {
        rank: [(dtype, shape) for dtype, shape in tensors] for rank, (_, tensors) in found.items()
    }


def gather(tensors: Sequence[Tensor], found: dict[int, list[Described]]) -> dict[int, list[Tensor]]:
    """Give each of the processes the tensors of all, as they were described, by rank."""
    own = _flat(tensors)
    flat = _exchanged(dict.fromkeys(found, own), {rank: _size(found[rank]) for rank in found})
    return {rank: _read(message, found[rank]) for rank, message in flat.items()}


def broadcast(
    tensors: Sequence[Tensor], root: int, found: dict[int, list[Described]]
) -> list[Tensor]:
    """Give each of the processes the tensors of one."""
    if dist.is_initialized() and dist.get_rank() != root:
        flat = _exchanged({}, {root: _size(found[root])})
        return _read(flat[root], found[root])
    own = _flat(tensors)
    return _read(_exchanged(dict.fromkeys(found, own), {root: own.numel()})[root], found[root])


def _texts(own: bytes, ranks: Sequence[int]) -> dict[int, bytes]:
    """A short text of each process."""
    count = torch.tensor([len(own)]).view(torch.uint8)
    counts = _exchanged(dict.fromkeys(ranks, count), {rank: count.numel() for rank in ranks})
    sizes = {rank: int(message.view(torch.int64)) for rank, message in counts.items()}
    text = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    texts = _exchanged(dict.fromkeys(ranks, text), sizes)
    return {rank: message.numpy().tobytes() for rank, message in texts.items()}


def _exchanged(sent: dict[int, Tensor], sizes: dict[int, int]) -> dict[int, Tensor]:
    """Send flat messages to ranks, and get those of these sizes in bytes, by rank.

    A message to this process itself is a copy.
    """
    own = dist.get_rank() if dist.is_initialized() else 0
    got = {rank: torch.empty(size, dtype=torch.uint8) for rank, size in sizes.items()}
    work = [dist.irecv(t, rank, tag=_TAG) for rank, t in got.items() if rank != own and t.numel()]
    work += [dist.isend(t, rank, tag=_TAG) for rank, t in sent.items() if rank != own and t.numel()]
    if own in got:
        got[own].copy_(sent[own])
    for message in work:
        if message is not None:
            message.wait()
    return got


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one behind the other."""
    parts = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *parts])


def _read(flat: Tensor, described: list[Described]) -> list[Tensor]:
    """The tensors in these bytes, each in memory of its own."""
    sizes = [_size([one]) for one in described]
    return [
        part.clone().view(_dtype(dtype)).reshape(shape)
        for part, (dtype, shape) in zip(flat.split(sizes), described, strict=True)
    ]


def _size(described: list[Described]) -> int:
    """How many bytes such tensors have."""
    return sum(_dtype(dtype).itemsize * math.prod(shape) for dtype, shape in described)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
