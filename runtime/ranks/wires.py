"""Carry values of micro-batches between ranks.

A message has the value's elements, its strides and its place in a block of 64 bytes. Libraries
compute other bits for operands with another layout or alignment. So functions on another rank get
the operands that they get in one process.

    bytes 0 ..      that place and the strides, as int64
    from `_start`   64 bytes more than the elements have: they begin at that place
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.program import TensorType
from ipu_dynamo.runtime.changes import Changes
from ipu_dynamo.runtime.ranks.transport import Pending, Tag, Transport

_BLOCK = 64  # bytes, the alignment of libraries
_UNREAD = 2  # messages of a wire that wait to be taken while no further one is received
_LOOK = 1.0  # seconds

_Key = tuple[int, int, int]  # the other rank, the wire, and the replica in its rank


@dataclass(eq=False)
class _Incoming:
    """The messages of a wire that have arrived in this step."""

    arrived: int = 0
    unread: deque[Tensor | None] = field(default_factory=deque)


@dataclass(eq=False)
class _Outgoing:
    """The messages of a wire in this step: those that are under way, and how many are owed."""

    sends: deque[Pending] = field(default_factory=deque)
    owed: int = 0
    type: TensorType | None = None
    is_watched: bool = False  # by a thread that waits for the sends


class Wires:
    """The messages of a program's steps from and to other ranks.

    Only threads of this object wait in the transport, two for each wire: one receives, the other
    waits for the end of sends. They end with the step. All methods may be called by any thread, but
    `expect` and `complete` by one alone.

    Invariant: after an error every thread ends as soon as the transport lets it.

    Args:
        number: of the program on this mesh, the same on all ranks.

    Attributes:
        changed: is called after each arrival, and after an error.
        error: the first one that a thread met, such as a RankLost.
    """

    def __init__(self, transport: Transport, number: int) -> None:
        self._transport, self._number = transport, number
        self.changed: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self._changes = Changes()
        self._incoming: dict[_Key, _Incoming] = {}
        self._outgoing: dict[_Key, _Outgoing] = {}
        self._begun = self._ended = 0  # threads
        self._ends = False  # no value will be posted in this step
        self._drains = False  # nor taken
        transport.follow(self._lose)

    def expect(
        self, rank: int, wire: int, replica: int, count: int, type: TensorType | None
    ) -> None:
        """Begin to receive the messages of a step.

        Args:
            count: of messages.
            type: of their values; None: they are empty.
        """
        key = rank, wire, replica
        incoming = self._incoming[key] = _Incoming()
        self._start(partial(self._receive, key, incoming, count, type), f"receives {key}")

    def promise(
        self, rank: int, wire: int, replica: int, count: int, type: TensorType | None
    ) -> None:
        """Owe another rank so many messages in a step; see `drain`."""
        self._outgoing[rank, wire, replica] = _Outgoing(owed=count, type=type)

    def post(self, rank: int, wire: int, replica: int, value: Tensor | None) -> None:
        """Send a copy of a value, or an empty message. Never waits."""
        message = torch.empty(_BLOCK, dtype=torch.uint8) if value is None else _packed(value)
        self._send((rank, wire, replica), message)

    def drain(self) -> None:
        """Give up a step: send zeros for all messages owed, and drop those to come. Never waits.

        Other ranks get all messages that they wait for, so they come to the end of the step.
        """

        def note() -> None:
            self._drains = True
            for incoming in self._incoming.values():
                incoming.unread.clear()

        self._changes.make(note)
        zeros: dict[TensorType | None, Tensor] = {None: torch.zeros(_BLOCK, dtype=torch.uint8)}
        for key, outgoing in self._outgoing.items():
            if (type_ := outgoing.type) not in zeros:
                assert type_ is not None
                zeros[type_] = _packed(torch.zeros(type_.shape, dtype=type_.dtype))
            while outgoing.owed > 0:
                self._send(key, zeros[type_])

    def _send(self, key: _Key, message: Tensor) -> None:
        if self.error is not None:
            raise self.error
        rank, wire, replica = key
        outgoing = self._outgoing.get(key)
        if outgoing is None:
            self.promise(*key, 0, None)
            outgoing = self._outgoing[key]

        def note(pending: Pending) -> None:
            outgoing.sends.append(pending)
            outgoing.owed -= 1

        with DeferredSignals():  # else a message might be sent and still owed, or have no memory
            pending = self._transport.send(rank, self._tag(wire, replica), message)
            self._changes.make(partial(note, pending))
            if not outgoing.is_watched:
                outgoing.is_watched = True
                self._start(partial(self._finish_sends, outgoing.sends), f"sends {key}")

    def arrived(self, rank: int, wire: int, replica: int) -> int:
        """How many messages have arrived in this step."""
        return self._incoming[rank, wire, replica].arrived

    def take(self, rank: int, wire: int, replica: int) -> Tensor | None:
        """Take the next message of a wire, which has arrived. It has memory of its own."""
        unread = self._incoming[rank, wire, replica].unread
        values: list[Tensor | None] = []
        self._changes.make(lambda: values.append(unread.popleft()))
        return values[0]

    def wait(self, rank: int, wire: int, replica: int) -> None:
        """Wait until there is a message to take.

        Raises:
            RankLost: none can come.
        """
        unread = self._incoming[rank, wire, replica].unread
        self._until(lambda: bool(unread))

    def complete(self) -> None:
        """End a step: wait for all that was posted and expected.

        Raises:
            RankLost: some of it cannot complete.
        """

        def end() -> None:
            self._ends = True

        self._changes.make(end)
        self._until(lambda: self._begun == self._ended)
        if self.error is not None:
            raise self.error
        self._ends = self._drains = False
        self._incoming.clear()
        self._outgoing.clear()

    def _tag(self, wire: int, replica: int) -> Tag:
        return self._number, wire, replica

    def _until(self, ready: Callable[[], bool]) -> None:
        """Wait; raises the error of a thread if one met one first."""
        while not self._changes.wait_for(lambda: ready() or self.error is not None, _LOOK):
            pass
        if not ready():
            assert self.error is not None
            raise self.error

    def _lose(self, error: BaseException) -> None:
        """Raise this in all waits, unless there was another error before."""

        def note() -> None:
            self.error = self.error or error

        self._changes.make(note)
        self.changed()

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # the waiting thread raises it
                self._lose(error)

            def end() -> None:
                self._ended += 1

            self._changes.make(end)

        def begin() -> None:
            self._begun += 1

        with DeferredSignals():  # else an interrupted start may have begun or not
            threading.Thread(target=run, name=f"wire {name}", daemon=True).start()
            self._changes.make(begin)

    def _receive(self, key: _Key, incoming: _Incoming, count: int, type: TensorType | None) -> None:
        rank, wire, replica = key
        size = _BLOCK if type is None else _size(type)
        for _ in range(count):
            self._until(lambda: len(incoming.unread) < _UNREAD)
            message = torch.empty(size, dtype=torch.uint8)
            self._transport.receive(rank, self._tag(wire, replica), message).wait()
            value = None if type is None else _unpacked(message, type)

            def note(value: Tensor | None) -> None:
                incoming.arrived += 1
                if not self._drains:
                    incoming.unread.append(value)

            self._changes.make(partial(note, value))
            self.changed()

    def _finish_sends(self, sends: deque[Pending]) -> None:
        while True:
            self._until(lambda: bool(sends) or self._ends)
            if not sends:
                return
            sends[0].wait()

            def note() -> None:
                sends.popleft()

            self._changes.make(note)


def _start_of_elements(dimensions: int) -> int:
    return -(-8 * (1 + dimensions) // _BLOCK) * _BLOCK


def _size(type: TensorType) -> int:
    """The bytes of a message."""
    return _start_of_elements(len(type.shape)) + _BLOCK + type.nbytes


def _elements(message: Tensor, place: int, type: TensorType) -> Tensor:
    """The elements in a message, in a row."""
    start = _start_of_elements(len(type.shape)) + place
    return message[start : start + type.nbytes].view(type.dtype)


def _packed(value: Tensor) -> Tensor:
    """The message of a value."""
    type_, stride = TensorType.of(value), value.stride()
    message = torch.empty(_size(type_), dtype=torch.uint8)
    place = value.data_ptr() % _BLOCK
    if place % type_.dtype.itemsize:
        place = 0
    words = [place, *stride]
    message[: 8 * len(words)].view(torch.int64).copy_(torch.tensor(words))
    elements = _elements(message, place, type_)
    if _is_dense(type_.shape, stride):
        elements.as_strided(type_.shape, stride).copy_(value)
    else:
        elements.view(type_.shape).copy_(value)
    return message


def _unpacked(message: Tensor, type: TensorType) -> Tensor:
    """The value of a message, in its memory if it is dense."""
    words = message[: 8 * (1 + len(type.shape))].view(torch.int64).tolist()
    place, stride = words[0], tuple(words[1:])
    elements = _elements(message, place, type)
    if _is_dense(type.shape, stride):
        return elements.as_strided(type.shape, stride)
    first = place // type.dtype.itemsize
    reach = 1 + sum((size - 1) * step for size, step in zip(type.shape, stride, strict=True))
    memory = torch.zeros(first + reach, dtype=type.dtype)
    places = torch.arange(reach).as_strided(type.shape, stride).flatten()
    memory[first:][places] = elements  # where elements share memory, they are equal
    return memory.as_strided(type.shape, stride, first)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements fill their memory, and none shares it with another."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True
