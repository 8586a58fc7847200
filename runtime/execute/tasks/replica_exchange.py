"""Hand values of a micro-batch from replica to replica."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ipu_dynamo.program import Collective
from ipu_dynamo.program.replica_tree import additions
from ipu_dynamo.program.share import OwnReplicas


@dataclass
class _MicroBatch:
    """The values of the replicas, and a flag for each that took its result."""

    given: list[Tensor | None]
    taken: list[bool]


@dataclass(frozen=True)  # its members are kept: each replica asks for them in each micro-batch
class ReplicaExchange:
    """Does one collective, for every micro-batch.

    Each replica gives its value, in any order and thread. Once all of its group have, it takes its
    result; the schedule sees to that.

    Args:
        replicas: those that run here.
    """

    collective: Collective
    replicas: OwnReplicas
    _held: dict[int, _MicroBatch] = field(default_factory=dict)

    @cached_property
    def _members(self) -> tuple[tuple[int, ...], ...]:
        """For each replica, those of its group."""
        groups = self.replicas.members(self.collective.groups)
        of = {replica: members for members in groups for replica in members}
        return tuple(of[replica] for replica in self.replicas.places)

    def give(self, place: int, value: Tensor) -> None:
        """Give a value, which is not written any more.

        Args:
            place: of the micro-batch in a call, and of its replica: `micro-batch * replicas +
                replica`.
        """
        count = len(self.replicas.own)
        number, replica = divmod(place, count)
        empty = _MicroBatch([None] * count, [False] * count)
        self._held.setdefault(number, empty).given[replica] = value

    def take(self, place: int) -> Tensor:
        """Return the result of a replica: dense, as programs say, and in its own memory."""
        number, replica = divmod(place, len(self.replicas.own))
        held, members = self._held[number], self._members[replica]
        given = (held.given[member] for member in members)
        values = [value for value in given if value is not None]
        assert len(values) == len(members), "the schedule waits for all replicas of a group"
        result = _RESULTS[self.collective.kind](values, members.index(replica)).contiguous()
        held.taken[replica] = True
        if all(held.taken):
            self._held.pop(number, None)
        return result

    def clear(self) -> None:
        """Forget the values of a failed step."""
        self._held.clear()


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
