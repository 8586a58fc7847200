"""Run the streams between ranks: the messages of a step from and to other ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ipu_dynamo.errors import CompileError, IpuError
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.program import (
    Collective,
    Copy,
    HostProgram,
    ReceiveFromRank,
    ReplicaGroups,
    SendToRank,
    TensorType,
)
from ipu_dynamo.program.schedule.actions import ReceiveValues, SendValues, Transfer
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.execute.tasks.replica_exchange import ReplicaExchange
from ipu_dynamo.runtime.ranks.transport import Transport
from ipu_dynamo.runtime.ranks.wires import Wires

RowValue = tuple[str, int, TensorType]  # its name, the IPU that has it, and its type
Key = tuple[int, int, int]  # another rank, a wire, and the place of a replica in its rank
_NUMBERS: WeakKeyDictionary[Transport, int] = WeakKeyDictionary()  # executables so far


def agree_on_numbers(transport: Transport) -> None:
    """Number the next executable alike on all ranks, after one could not make its own."""
    own = torch.tensor([_NUMBERS.get(transport, 0)])
    _NUMBERS[transport] = int(transport.maximum("mesh", own).item())


class Awaited(NamedTuple):
    """The message of this number, from 1, on a wire."""

    key: Key
    number: int
    is_empty: bool


@dataclass(frozen=True, slots=True)
class _Column:
    """The messages of a collective; see `OtherRanks`."""

    wires: Wires
    number: int

    def post(self, rank: int, value: Tensor) -> None:
        self.wires.post(rank, self.number, 0, value)

    def take(self, rank: int) -> Tensor:
        value = self.wires.take(rank, self.number, 0)
        assert value is not None, "a message of an exchange has a value"
        return value


class RankStreams:
    """The messages of each step of an executable.

    Each wire has a message for a micro-batch, or for a step if it is outside of the loop. Where a
    worker only waits for one of another rank, an empty message stands for that.

    Invariant: between steps no message is under way, except after an error of the transport.

    Args:
        host: with a share.
        schedule: of the rank.
    """

    def __init__(self, host: HostProgram, schedule: Schedule, transport: Transport) -> None:
        assert host.share is not None
        self.transport, self._share, self._replicas = transport, host.share, host.replicas
        self._ipus, self._own = host.program.num_ipus, host.share.ipus(host.program.num_ipus)
        self._schedule = schedule
        self.number = _NUMBERS[transport] = _NUMBERS.get(transport, 0) + 1
        self._wires, self._in_row = Wires(transport, self.number), False
        cut, local = sections(host.inlined), sections(host.runs)
        self._micro_batches, self._first_order = cut.micro_batches, len(cut.all)
        copied = {i.result for i in cut.loop if isinstance(i, Copy)}
        # of each transfer; the rank of an IPU receives values of the host itself
        self._values = [copied.intersection(each.values) for each in schedule.transfers]
        self._incoming: dict[Key, tuple[int, TensorType | None]] = {}  # within the loop
        self._outgoing: dict[Key, tuple[int, TensorType | None]] = {}
        self._received: dict[str, ReceiveFromRank] = {}  # by name
        for instruction in local.loop:
            if isinstance(instruction, SendToRank):
                for key in self._keys(instruction):
                    self._outgoing[key] = cut.micro_batches, instruction.type
            elif isinstance(instruction, ReceiveFromRank):
                self._received[instruction.result] = instruction
                for key in self._keys(instruction):
                    self._incoming[key] = cut.micro_batches, instruction.type
        self._exchanges = {
            i.result: (number, ReplicaExchange(i, host.replicas, *self._column(i, number)))
            for number, i in enumerate(cut.all)
            if isinstance(i, Collective) and i.ipu in self._own
        }
        for number, exchange in self._exchanges.values():
            for rank, block in exchange.blocks:
                if (own := host.replicas.own) != block:
                    key, sent = (rank, number, 0), exchange.message_type(own, block)
                    self._incoming[key] = cut.micro_batches, exchange.message_type(block, own)
                    self._outgoing[key] = cut.micro_batches, sent
        self._awaited = self._plan_waits()

    def _plan_waits(self) -> dict[ReceiveValues, tuple["Awaited", ...]]:
        """For each receive of another rank, the wires and how many of their messages it needs."""
        actions = [action for of in self._schedule.workers for action in of]
        sent = {
            (a.transfer, a.micro_batch, a.replica) for a in actions if isinstance(a, SendValues)
        }
        theirs = defaultdict[tuple[int, int], set[int]](set)  # micro-batches, by transfer, replica
        for action in actions:
            message = action.micro_batch, action.replica
            if isinstance(action, ReceiveValues) and (action.transfer, *message) not in sent:
                theirs[action.transfer, action.replica].add(action.micro_batch)
            elif isinstance(action, SendValues) and (key := self._order_key(action)):
                count, _ = self._outgoing.get(key, (0, None))
                self._outgoing[key] = count + 1, None
        awaited = {}
        for (number, replica), micro_batches in theirs.items():
            transfer = self._schedule.transfers[number]
            if replica not in self._replicas.own:
                ipu, wires = self._schedule.passes[transfer.source].ipu, self._wires_of(transfer)
                rank = self._share.rank_of(replica, ipu, self._replicas.count, self._ipus)
                for micro_batch in micro_batches:
                    action = ReceiveValues(number, micro_batch, replica)
                    keys = [(rank, wire, 0) for wire in wires]
                    awaited[action] = tuple(Awaited(key, micro_batch + 1, False) for key in keys)
                continue
            place = replica - self._replicas.own.start
            if self._values[number]:
                received = [self._received[name] for name in self._values[number]]
                keys = [(self._rank(i.origin), i.wire, place) for i in received]
            else:
                source = self._schedule.passes[transfer.source].ipu
                keys = [(self._rank(source), self._order_wire(number), place)]
                self._incoming[keys[0]] = len(micro_batches), None
            for count, micro_batch in enumerate(sorted(micro_batches), 1):
                action = ReceiveValues(number, micro_batch, replica)
                empty = not self._values[number]
                awaited[action] = tuple(Awaited(key, count, empty) for key in keys)
        return awaited

    def _column(
        self, collective: Collective, wire: int
    ) -> tuple[tuple[tuple[int, range], ...], "_Column"] | tuple[()]:
        """The ranks whose replicas take part in a collective; empty: this one alone.

        Raises:
            CompileError: a group of replicas is on several ranks.
        """
        of, count = (
            [self._share.of_rank(rank) for rank in self._share.of_column],
            self._replicas.count,
        )
        if len(of) == 1:
            return ()
        groups = collective.groups or ReplicaGroups(count)
        if groups.are_whole(count, len(self._replicas.own)):
            return ()
        if groups.size < count:
            raise CompileError(
                f"each {groups} exchanges tensors, and no rank with its {len(self._replicas.own)} "
                "replicas has a whole one",
                where=collective.source,
                hint="groups of consecutive replicas whose size divides the replicas of a rank",
            )
        blocks = tuple((share.rank, share.replicas(count)) for share in of)
        return blocks, _Column(self._wires, wire)

    def exchange(self, collective: Collective) -> ReplicaExchange:
        """Return the exchange of a collective, with the other ranks of the column."""
        return self._exchanges[collective.result][1]

    def _wires_of(self, transfer: Transfer) -> list[int]:
        """The wires of the exchanges that a transfer between replicas is for."""
        return [
            number
            for number, exchange in self._exchanges.values()
            if exchange.collective.value in transfer.values and exchange.others is not None
        ]

    def _rank(self, ipu: int) -> int:
        """The rank of an IPU in this row."""
        first, count = self._replicas.own.start, self._replicas.count
        return self._share.rank_of(first, ipu, count, self._ipus)

    def _keys(self, stream: SendToRank | ReceiveFromRank) -> list[Key]:
        """A key for each message of a stream at one time."""
        rank = self._rank(stream.to if isinstance(stream, SendToRank) else stream.origin)
        places = self._replicas.places if stream.each else range(1)
        return [(rank, stream.wire, place) for place in places]

    def _order_wire(self, transfer: int) -> int:
        """The number of the wire of a transfer without values: after those of copies."""
        of = self._schedule.transfers[transfer]
        return self._first_order + of.source * len(self._schedule.passes) + of.target

    def _order_key(self, action: SendValues) -> Key | None:
        """The wire on which an action sends an empty message to another rank, if it does."""
        transfer = self._schedule.transfers[action.transfer]
        ipu = self._schedule.passes[transfer.target].ipu
        if self._values[action.transfer] or ipu in self._own:
            return None
        place = action.replica - self._replicas.own.start
        return self._rank(ipu), self._order_wire(action.transfer), place

    @property
    def in_loop(self) -> bool:
        """Whether a micro-batch sends or receives anything."""
        return bool(self._incoming or self._outgoing)

    @property
    def error(self) -> BaseException | None:
        """The error of the transport, if there is one."""
        return self._wires.error

    def begin(self, once: Iterable[SendToRank | ReceiveFromRank]) -> None:
        """Begin to receive the messages of a step.

        Args:
            once: the streams outside of the loop.
        """
        incoming, outgoing = dict(self._incoming), dict(self._outgoing)
        for stream in once:
            ends = outgoing if isinstance(stream, SendToRank) else incoming
            ends |= dict.fromkeys(self._keys(stream), (1, stream.type))
        for key, (count, type_) in outgoing.items():
            self._wires.promise(*key, count, type_)
        for key, (count, type_) in incoming.items():
            self._wires.expect(*key, count, type_)

    def end(self) -> None:
        """Wait until all messages of a step are complete."""
        self._wires.complete()

    def drain(self) -> None:
        """Send zeros in place of the step's missing values, and drop values that arrive."""
        self._wires.drain()

    def send(self, stream: SendToRank, values: Sequence[Tensor]) -> None:
        """Send values outside of the loop, one for each message of the stream."""
        for key, value in zip(self._keys(stream), values, strict=True):
            self._wires.post(*key, value)

    def receive(self, stream: ReceiveFromRank) -> list[Tensor]:
        """Wait for values outside of the loop."""
        keys = self._keys(stream)
        for key in keys:
            self._wires.wait(*key)
        return [self._take(key) for key in keys]

    def post_of(self, stream: SendToRank) -> Callable[[int, Tensor], None]:
        """Return a function that sends the value of a micro-batch, by its place."""
        keys, count = self._keys(stream), len(self._replicas.own)

        def post(place: int, value: Tensor) -> None:
            self._wires.post(*keys[place % count], value)

        return post

    def take_of(self, stream: ReceiveFromRank) -> Callable[[int], Tensor]:
        """Return a function that takes the value of a micro-batch, which is there, by its place."""
        keys, count = self._keys(stream), len(self._replicas.own)
        return lambda place: self._take(keys[place % count])

    def _take(self, key: Key) -> Tensor:
        value = self._wires.take(*key)
        assert value is not None, "a message of a stream has a value"
        return value

    def awaits(self, action: ReceiveValues) -> bool:
        """Whether an action is about another rank."""
        return action in self._awaited

    def awaited(self, action: ReceiveValues) -> tuple["Awaited", ...]:
        """The messages of another rank that an action waits for."""
        return self._awaited[action]

    def have_arrived(self, awaited: Sequence["Awaited"]) -> bool:
        """Whether messages are there."""
        return all(self._wires.arrived(*each.key) >= each.number for each in awaited)

    def take_empty(self, awaited: Sequence["Awaited"]) -> None:
        """Take the messages without a value, which nothing else takes."""
        for each in awaited:
            if each.is_empty:
                self._wires.take(*each.key)

    def hand_over(self, action: SendValues) -> None:
        """Tell another rank that it need not wait, if it only waits for this action."""
        if key := self._order_key(action):
            self._wires.post(*key, None)

    def give_row(self, own: Mapping[str, Tensor], all_of: Sequence[RowValue]) -> dict[str, Tensor]:
        """Send values that one rank has to every rank of the row, between steps.

        Args:
            own: the values here, by name.
            all_of: the values of all ranks.
        """
        keys = self._begin_row(all_of)
        got: dict[str, Tensor] = {}
        for (name, _, _), own_keys in zip(all_of, keys, strict=True):
            if name in own:
                for key in own_keys:
                    self._wires.post(*key, own[name])
        for (name, _, _), (key, *_) in zip(all_of, keys, strict=True):
            if name in own:
                got[name] = own[name]
            else:
                self._wires.wait(*key)
                got[name] = self._take(key)
        self._end_row()
        return got

    def _begin_row(self, all_of: Sequence[RowValue]) -> list[list[Key]]:
        """Begin to exchange values; returns the keys of each: to all others, or from its rank."""
        first = self._first_order + len(self._schedule.passes) ** 2
        others = [rank for rank in self._share.of_row if rank != self._share.rank]
        keys: list[list[Key]] = []
        with DeferredSignals():  # one may not be begun in part
            self._in_row = True
            for wire, (_, ipu, type_) in enumerate(all_of, first):
                if ipu in self._own:
                    keys.append([(rank, wire, 0) for rank in others])
                    for key in keys[-1]:
                        self._wires.promise(*key, 1, type_)
                else:
                    keys.append([(self._rank(ipu), wire, 0)])
                    self._wires.expect(*keys[-1][0], 1, type_)
        return keys

    def _end_row(self) -> None:
        self._wires.complete()
        self._in_row = False

    def drain_row(self, all_of: Sequence[RowValue]) -> None:
        """Take part in `give_row` without values; go on if it has begun."""
        if not self._in_row:
            self._begin_row(all_of)
        self._wires.drain()
        self._end_row()

    @contextmanager
    def unbroken(self, problem: str) -> Iterator[None]:
        """Let signals wait while ranks exchange something. A second one ends that, and the mesh.

        Raises:
            RankLost: the exchange did not end; it has this text.
        """
        has_begun = is_done = False
        try:
            with DeferredSignals(once=True):
                has_begun = True
                yield
                is_done = True
        except BaseException as error:
            if not has_begun or is_done or isinstance(error, IpuError):
                raise
            raise self.transport.abandon(problem) from error

    def follow(self, changed: Callable[[], None]) -> None:
        """Call this after each arrival and each error."""
        self._wires.changed = changed
