"""Hand values of a micro-batch from replica to replica."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ipu_dynamo.program import Collective, TensorType
from ipu_dynamo.program.local_program import message_type
from ipu_dynamo.program.replica_tree import additions, subtrees
from ipu_dynamo.program.share import OwnReplicas


class OtherRanks(Protocol):
    """The other ranks of a column, which take part in an exchange."""

    def post(self, rank: int, value: Tensor) -> None:
        """Send a rank its message of a micro-batch."""

    def take(self, rank: int) -> Tensor:
        """Take the message of a rank for the next micro-batch. It is there."""


@dataclass
class _MicroBatch:
    """The values of the replicas, a flag for each that took its result, and others' messages."""

    given: list[Tensor | None]
    taken: list[bool]
    missing: int  # values of replicas here
    theirs: list[Tensor] | None = None  # of each rank of the column; the own one's is there, too


@dataclass(frozen=True)  # its members are kept: each replica asks for them in each micro-batch
class ReplicaExchange:
    """Does one collective, for every micro-batch.

    Each replica gives its value, in any order and thread. Once all of its group have, it takes its
    result; the schedule sees to that. With replicas on other ranks the last one here sends each of
    these a message: all values, the sums of the largest subtrees, or the receiver's parts.

    Args:
        replicas: those that run here.
        blocks: the replicas of each rank of the column, this one's included; empty: all replicas
            that exchange anything are here.
        others: the other ranks.
    """

    collective: Collective
    replicas: OwnReplicas
    blocks: tuple[tuple[int, range], ...] = ()  # of each rank
    others: OtherRanks | None = None
    _held: dict[int, _MicroBatch] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def _members(self) -> tuple[tuple[int, ...], ...]:
        """For each replica, those of its group."""
        groups = self.replicas.members(self.collective.groups)
        of = {replica: members for members in groups for replica in members}
        return tuple(of[replica] for replica in self.replicas.places)

    @cached_property
    def _across(self) -> list[tuple[int, int]]:
        """The additions of subtrees of several ranks, by their places among all."""
        count = self.replicas.count
        parts = [part for _, block in self.blocks for part in subtrees(count, block)]
        part_of = {replica: place for place, part in enumerate(parts) for replica in part}
        pairs = ((part_of[total], part_of[term]) for total, term in additions(count))
        return [(total, term) for total, term in pairs if total != term]

    def message_type(self, sender: range, receiver: range) -> TensorType:
        """The type of a message from a rank with some replicas to one with others."""
        return message_type(self.collective, self.replicas.count, sender, receiver)

    def give(self, place: int, value: Tensor) -> None:
        """Give a value, which is not written any more.

        Args:
            place: of the micro-batch in a call, and of its replica: `micro-batch * replicas +
                replica`.
        """
        count = len(self.replicas.own)
        number, replica = divmod(place, count)
        with self._lock:
            held = self._held.get(number)
            if held is None:
                held = self._held[number] = _MicroBatch([None] * count, [False] * count, count)
            held.given[replica] = value
            held.missing -= 1
            is_last = not held.missing
        if is_last and self.others is not None:
            for rank, block in self.blocks:
                if block != self.replicas.own:
                    self.others.post(rank, self._message(held, block))

    def take(self, place: int) -> Tensor:
        """Return the result of a replica: dense, as programs say, and in its own memory."""
        number, replica = divmod(place, len(self.replicas.own))
        held = self._held[number]
        if self.others is None:
            members = self._members[replica]
            values = [value for m in members if (value := held.given[m]) is not None]
            assert len(values) == len(members), "the schedule waits for all replicas of a group"
            result = _RESULTS[self.collective.kind](values, members.index(replica)).contiguous()
        else:
            result = self._of_ranks(held, replica).contiguous()
        with self._lock:
            held.taken[replica] = True
            if all(held.taken):
                self._held.pop(number, None)
        return result

    def clear(self) -> None:
        """Forget the values of a failed step."""
        self._held.clear()

    def _message(self, held: _MicroBatch, receiver: range) -> Tensor:
        """Return the message to a rank with some replicas."""
        values = [value for value in held.given if value is not None]
        match self.collective.kind:
            case "all_gather":
                return torch.stack(values)
            case "all_reduce":
                first = self.replicas.own.start
                parts = subtrees(self.replicas.count, self.replicas.own)
                sums = (values[part.start - first : part.stop - first] for part in parts)
                return torch.stack([_sum(of_part, 0) for of_part in sums])
            case "all_to_all":
                first = receiver.start * (values[0].shape[0] // self.replicas.count)
                rows = len(receiver) * (values[0].shape[0] // self.replicas.count)
                return torch.stack([value.narrow(0, first, rows) for value in values])

    def _of_ranks(self, held: _MicroBatch, replica: int) -> Tensor:
        """The result of a replica, with values of other ranks."""
        assert self.others is not None
        with self._lock:
            if held.theirs is None:
                held.theirs = [
                    self._message(held, block)
                    if block == self.replicas.own
                    else self.others.take(rank)
                    for rank, block in self.blocks
                ]
        every = [value for message in held.theirs for value in message.unbind(0)]
        if self.collective.kind == "all_gather":
            return torch.stack(every)
        if self.collective.kind == "all_reduce":
            for total, term in self._across:
                every[total] = every[total] + every[term]
            return every[0].clone()
        rows = self.collective.type.shape[0] // self.replicas.count
        return torch.cat([value.narrow(0, replica * rows, rows) for value in every])


def _sum(values: Sequence[Tensor], _: int) -> Tensor:
    sums = list(values)
    for total, term in additions(len(sums)):
        sums[total] = sums[total] + sums[term]
    return sums[0]


def _exchange(values: Sequence[Tensor], place: int) -> Tensor:
    return torch.cat([value.tensor_split(len(values))[place] for value in values])


def _gather(values: Sequence[Tensor], _: int) -> Tensor:
    return torch.stack(list(values))


_RESULTS: dict[str, Callable[[Sequence[Tensor], int], Tensor]] = {
    "all_gather": _gather,
    "all_reduce": _sum,
    "all_to_all": _exchange,
}
