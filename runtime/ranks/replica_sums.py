"""Sum values over the replicas of a program, which may be in several ranks of a column.

The sums are those of one process, bit by bit: they follow one tree by replica number
(`program/replica_tree.py`). A rank adds the values of its largest subtrees. Their sums cross to
other ranks, and are added in the order of the tree.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import foreach_add_, foreach_copy_
from ipu_dynamo.program.replica_tree import GATHERED_BYTES, additions, subtrees
from ipu_dynamo.runtime.ranks.transport import Transport

_Addition = tuple[int, int]  # the place of the sum, and of the term that is added to it


class ReplicaSums:
    """Sums of some values over all replicas, each in the tensor of the first own replica.

    The tensors of other replicas are overwritten with partial sums.

    Args:
        values: for each of the rank's replicas, its tensors. The tensors of one place have one type
            on all ranks.
        replicas: of all ranks together.
        transport: carries partial sums along the column; None: the rank has all replicas.
    """

    def __init__(
        self,
        values: Sequence[Sequence[Tensor]],
        replicas: int,
        transport: Transport | None = None,
    ) -> None:
        own, blocks = range(replicas), [range(replicas)]
        if transport is not None:
            share = transport.share
            own = share.replicas(replicas)
            blocks = [share.of_rank(rank).replicas(replicas) for rank in share.of_column]
        if len(values) != len(own):
            raise ValueError(f"values of {len(values)} replicas, and the rank has {len(own)}")
        values = [[tensor for tensor in tensors if tensor.numel()] for tensors in values]
        self._local: list[tuple[list[Tensor], list[Tensor]]] = []
        self._exchanges: list[_Gathered | _Dealt] = []
        if not values[0]:
            return
        parts = [part for block in blocks for part in subtrees(replicas, block)]
        part_of = {replica: place for place, part in enumerate(parts) for replica in part}
        adds = [*additions(replicas)]
        self._local = [
            ([*values[total - own.start]], [*values[term - own.start]])
            for total, term in adds
            if total in own and part_of[total] == part_of[term]
        ]
        if transport is None or len(blocks) == 1:
            return
        across = [
            (part_of[total], part_of[term])
            for total, term in adds
            if part_of[total] != part_of[term]
        ]
        counts = [len(subtrees(replicas, block)) for block in blocks]
        sent = [[*values[part.start - own.start]] for part in subtrees(replicas, own)]
        small: list[list[Tensor]] = [[] for _ in sent]
        for places in _by_dtype(sent[0]):
            picked = [[tensors[place] for place in places] for tensors in sent]
            if sum(tensor.nbytes for tensor in picked[0]) > GATHERED_BYTES:
                self._exchanges.append(_Dealt(transport, picked, counts, across))
            else:
                for few, tensors in zip(small, picked, strict=True):
                    few += tensors
        if small[0]:
            self._exchanges.append(_Gathered(transport, small, counts, across))

    def __call__(self) -> None:
        """Sum the values."""
        self.add_own()
        self.exchange()

    def add_own(self) -> None:
        """Add the values of the own replicas. Waits for no other rank."""
        for total, term in self._local:
            foreach_add_(total, term)

    def exchange(self, *, writes: bool = True) -> None:
        """Exchange partial sums with the ranks of the column, and add these.

        Args:
            writes: write the sums. Without it the rank only takes part, for the others.
        """
        for exchange in self._exchanges:
            exchange()
            if writes:
                exchange.write()


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors of one dtype, in order of their first ones."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    return [*places.values()]


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a flat tensor with the shapes of some tensors, one after the other."""
    ends = accumulate((tensor.numel() for tensor in tensors), initial=0)
    return [
        flat[start:end].view(tensor.shape)
        for (start, end), tensor in zip(pairwise(ends), tensors, strict=True)
    ]


class _Gathered:
    """Sums of few bytes: every rank gets all partial sums, and adds them.

    Args:
        sent: the tensors with the rank's partial sums, one list for each; those of one dtype are
            adjacent. The sums are written into the first list.
        counts: partial sums of each rank.
        across: the additions of partial sums, in order of ranks.
    """

    def __init__(
        self,
        transport: Transport,
        sent: Sequence[Sequence[Tensor]],
        counts: Sequence[int],
        across: Sequence[_Addition],
    ) -> None:
        self._transport, self._across = transport, across
        self._tensors = [tensor for tensors in sent for tensor in tensors]
        self._sums = [*sent[0]]
        size = sum(_padded(tensor.nbytes) for tensor in sent[0])
        self._message = torch.zeros(max(counts) * size, dtype=torch.uint8)
        self._all = torch.zeros(len(counts), max(counts), size, dtype=torch.uint8)
        self._sent = [
            view
            for number, tensors in enumerate(sent)
            for view in self._places(self._message[number * size :], tensors)
        ]
        self._parts = [
            self._places(self._all[rank, number], sent[0])
            for rank, count in enumerate(counts)
            for number in range(count)
        ]

    def _places(self, memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Where the values of these tensors are in a partial sum."""
        starts = accumulate((_padded(tensor.nbytes) for tensor in tensors), initial=0)
        return [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=False)
        ]

    def __call__(self) -> None:
        foreach_copy_(self._sent, self._tensors)
        self._transport.gather("column", self._message, self._all.view(-1))
        for total, term in self._across:
            foreach_add_(self._parts[total], self._parts[term])

    def write(self) -> None:
        """Write the sums into their tensors."""
        foreach_copy_(self._sums, self._parts[0])


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16  # every dtype may begin there


class _Dealt:
    """Sums of one dtype: each rank adds a part of the elements, and the parts are gathered.

    Args: those of `_Gathered`.
    """

    def __init__(
        self,
        transport: Transport,
        sent: Sequence[Sequence[Tensor]],
        counts: Sequence[int],
        across: Sequence[_Addition],
    ) -> None:
        self._transport, self._across = transport, across
        self._tensors = [[*tensors] for tensors in sent]
        dtype, ranks, own = sent[0][0].dtype, len(counts), transport.share.row
        part = -(-sum(prod(tensor.shape) for tensor in sent[0]) // ranks)
        self._whole = torch.zeros(ranks, part, dtype=dtype)
        self._views = _views(self._whole.view(-1), sent[0])
        # [rank, partial sum, element]: a single partial sum is sent where it is collected
        message = self._whole.unsqueeze(1)
        if len(sent) > 1:
            message = torch.zeros(ranks, len(sent), part, dtype=dtype)
        self._message = message
        got = [torch.zeros(count, part, dtype=dtype) for count in counts[:own]]
        got.append(message[own])
        got += [torch.zeros(count, part, dtype=dtype) for count in counts[own + 1 :]]
        self._parts = [partial for of_rank in got for partial in of_rank]
        others = [rank for rank in range(ranks) if rank != own]
        self._sent = {rank: _bytes(message[rank]) for rank in others}
        self._received = {rank: _bytes(got[rank]) for rank in others}

    def __call__(self) -> None:
        for number, tensors in enumerate(self._tensors):
            foreach_copy_(self._views, tensors)
            if len(self._tensors) > 1:
                self._message[:, number] = self._whole
        self._transport.exchange("column", self._sent, self._received)
        for total, term in self._across:
            self._parts[total].add_(self._parts[term])
        self._transport.gather("column", _bytes(self._parts[0]), _bytes(self._whole))

    def write(self) -> None:
        """Write the sums into their tensors."""
        foreach_copy_(self._tensors[0], self._views)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
