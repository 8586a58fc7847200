"""Carry messages between ranks that are processes, over torch.distributed.

This module makes groups of its own. Their timeout is longer than any run, as it would end waits
for ranks that are only slow. Threads of their own wait in torch, because torch notices no signals
there.
"""

import atexit
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.changes import Changes
from ipu_dynamo.runtime.ranks.transport import Among, Group, Tag
from ipu_dynamo.runtime.ranks.watch import Watch, limit_of_environment

_FOREVER = timedelta(days=300)
_REASON = re.compile(r"^(?:\[[^\]]*\] )?(.*?)(?:\. .*)?$", re.S)  # gloo's first sentence
_LOOK = 1.0  # seconds
_ADDRESS = 300  # bytes of a port and the name of a host
_PROGRAMS, _WIRES, _REPLICAS = 31, 1 << 16, 1 << 10  # below 31 bits together, as torch's tags are
_PARTS = _PROGRAMS * _WIRES * _REPLICAS  # the first tag of parts that groups exchange
_NEVER = (1 << 31) - 1  # the tag of no message
_PATIENT = 30.0  # seconds until a wait for the first contact is logged
_CLOSES = 5.0  # seconds until waits that do not end are left
_log = logging.getLogger("ipu_dynamo")


@dataclass(eq=False)
class _Job:
    """A collective that the transport's thread makes."""

    work: Callable[[], Any]
    ranks: Sequence[int]  # the others that take part
    is_posted: bool = False
    ended: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass(eq=False, frozen=True)
class _Sent:
    """A message that is under way, with its memory."""

    memory: Tensor
    work: dist.Work
    other: int
    watch: Watch

    def wait(self) -> None:
        with _watched(self.watch, (self.other,)):
            self.work.wait()


@contextmanager
def _watched(watch: Watch, ranks: Sequence[int]) -> Iterator[None]:
    """Wait for ranks; where torch reports a broken connection, say which of them is gone."""
    try:
        with watch.waiting(ranks):
            yield
    except RuntimeError as error:  # torch's for all that goes wrong in gloo
        (text,) = _REASON.findall(str(error).strip())
        raise watch.cause(ranks, f"a connection between ranks has ended: {text}") from error


class TorchTransport:
    """The transport of this process.

    It connects the ranks when it is first used, by all ranks at the same time. If there are several
    transports, all ranks begin to use them in the same order.

    Args:
        share: the place of this rank on the mesh.
        ranks: the numbers of all ranks in the default process group, in the order of the mesh.
    """

    def __init__(self, share: Share, ranks: Sequence[int]) -> None:
        self.share, self._process, self._ranks = share, os.getpid(), ranks
        self._changes, self._jobs = Changes(), SimpleQueue[_Job]()
        self._watch = Watch(share, limit=limit_of_environment())
        self._watch.follow(self._lose)
        self._members: dict[Among, range] = {
            "mesh": range(share.ranks),
            "row": share.of_row,
            "column": share.of_column,
        }
        self._groups: dict[Among, dist.ProcessGroup | None] = {}
        self._connecting, self._connection = threading.Lock(), _Job(self._connect, ())
        self._patience = _PATIENT

    def _connect(self) -> None:
        """Make the groups, and begin the watch, together with all ranks."""
        for among, of in self._members.items():
            if len(of) == self.share.ranks and among != "mesh":
                self._groups[among] = self._groups["mesh"]
            else:
                self._groups[among] = _group([self._ranks[rank] for rank in of])
        group = self._groups["mesh"]
        if group is not None and not _is_dry_run():
            self._watch.start(self._store(group))
            dist.barrier(group)  # from now on each rank has a beat
            atexit.register(self._leave)

    def _store(self, group: dist.ProcessGroup) -> TCPStore:
        """Meet the other ranks in a store that the first one serves."""
        where = torch.zeros(_ADDRESS, dtype=torch.uint8)
        if is_first := self.share.rank == 0:
            host = socket.gethostname()
            if self._ranks[0] == 0:  # the launcher's rank 0, too: others know its address
                host = os.environ.get("MASTER_ADDR", host)
            store = TCPStore(host, 0, is_master=True, timeout=_FOREVER, wait_for_workers=False)
            written = f"{store.port} {host}".encode()
            where[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
        dist.broadcast(where, group=group, group_src=0)
        if not is_first:
            port, host = bytes(where.tolist()).rstrip(b"\0").decode().split(" ")
            store = TCPStore(host, int(port), timeout=_FOREVER, wait_for_workers=False)
        return store

    def _leave(self) -> None:
        """End before Python does, with all threads that wait in torch.

        A thread that came out of torch while Python ends would end the process by a signal.
        """
        if os.getpid() != self._process:
            return  # connections are those of the process that forked
        self._watch.leave()
        if self._watch.has_waits:
            for group in {group for group in self._groups.values() if group is not None}:
                _close(group)
        end = monotonic() + _CLOSES
        while self._watch.has_waits and monotonic() < end:
            sleep(_CLOSES / 1000)

    def _lose(self, error: IpuError) -> None:
        self._changes.make(lambda: None)  # who waits looks

    def operation(self, among: Group, kind: str, text: str) -> AbstractContextManager[None]:
        """Say what the ranks do together, for errors of ranks that wait for each other."""
        return self._watch.operation(among, kind, text)

    def follow(self, lost: Callable[[IpuError], None]) -> None:
        """Call a method in another thread once the mesh is lost."""
        self._watch.follow(lost)

    def abandon(self, problem: str) -> IpuError:
        """Give up the mesh, as this rank cannot go on; returns the error of all ranks."""
        return self._watch.abandon(problem)

    def send(self, to: int, tag: Tag, message: Tensor) -> _Sent:
        """Send a message. Never waits."""
        group = self._group("mesh")
        with _watched(self._watch, (to,)):
            work = dist.isend(message, group=group, group_dst=to, tag=_number(tag))
        assert work is not None
        return _Sent(message, work, to, self._watch)

    def receive(self, source: int, tag: Tag, message: Tensor) -> _Sent:
        """Receive the next message of a tag into this memory."""
        group = self._group("mesh")
        with _watched(self._watch, (source,)):
            work = dist.irecv(message, group=group, group_src=source, tag=_number(tag))
            if _is_dry_run():
                message.zero_()
        assert work is not None
        return _Sent(message, work, source, self._watch)

    def gather(self, among: Among, part: Tensor, into: Tensor | None = None) -> Tensor:
        """Give every rank the parts of all, which have one size."""
        ranks, group = len(self._members[among]), self._group(among)
        if into is None:
            into = part.new_empty(ranks * part.numel())
        parts = into.view(ranks, part.numel())
        place = self._members[among].index(self.share.rank)
        if group is not None and _is_dry_run():
            return parts.copy_(part.clone())
        parts[place].copy_(part)
        if group is not None and part.numel():
            others = [other for other in range(ranks) if other != place]
            self.exchange(among, dict.fromkeys(others, part), {o: parts[o] for o in others})
        return parts

    def exchange(
        self, among: Among, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> None:
        """Send parts to other ranks of a group, and receive theirs.

        Gloo's own collectives take longer: an all-gather of 50 MB 3.5 times as long. They also end
        the process if ranks are in different ones, before the watch can say so.
        """
        if (group := self._group(among)) is not None:
            kind = self._watch.kind
            self._call(among, lambda: _exchange(group, kind, sent, received))

    def maximum(self, among: Among, values: Tensor) -> Tensor:
        """The largest value of all ranks at each place; values are int64."""
        return self.gather(among, values.view(torch.uint8)).view(torch.int64).amax(0)

    def broadcast(self, among: Among, message: Tensor) -> None:
        """Overwrite a message with that of the first rank of the group."""
        first, *others = range(len(self._members[among]))
        if self._members[among].index(self.share.rank) == first:
            self.exchange(among, dict.fromkeys(others, message), {})
        else:
            self.exchange(among, {}, {first: message})

    def _group(self, among: Among) -> dist.ProcessGroup | None:
        if os.getpid() != self._process:
            raise IpuError(
                "a forked process has no mesh, and cannot exchange anything with ranks\n"
                "  try:  call the program in the process that compiled it"
            )
        if self._watch.lost is not None:
            raise self._watch.lost
        if not self._connection.ended:
            with DeferredSignals(), self._connecting:
                if not self._connection.is_posted:
                    self._connection.is_posted = True
                    self._jobs.put(self._connection)
                    threading.Thread(target=self._work, name="ranks together", daemon=True).start()
        self._wait(self._connection)
        return self._groups[among]

    def _call(self, among: Among, work: Callable[[], Any]) -> Any:
        """Let the transport's thread do something after all before it; returns its result."""
        job = _Job(work, [rank for rank in self._members[among] if rank != self.share.rank])
        self._jobs.put(job)  # one operation: an interrupt comes before or after it
        return self._wait(job)

    def _wait(self, job: _Job) -> Any:
        since = monotonic()
        while not self._changes.wait_for(lambda: job.ended or self._watch.lost is not None, _LOOK):
            if job is self._connection and monotonic() - since > self._patience:
                self._patience = inf
                _log.warning(
                    "rank %d has waited %.0f s to connect to the others. All ranks of a mesh must "
                    "begin to use it, and make groups of the same ranks, in the same order",
                    self.share.rank, monotonic() - since,
                )  # fmt: skip
        if not job.ended:
            assert self._watch.lost is not None
            raise self._watch.lost
        if job.error is not None:
            raise job.error
        return job.result

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                with _watched(self._watch, job.ranks):
                    job.result = job.work()
            except BaseException as error:  # the caller raises it
                job.error = error

            def end(job: _Job = job) -> None:
                job.ended = True

            self._changes.make(end)


def _is_dry_run() -> bool:
    """Whether PyTorch's `fake` backend is in place of other ranks: values mean nothing then."""
    return dist.get_backend() == "fake"


def _group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a group whose members have this order; None for a single one."""
    if len(ranks) == 1:
        return None
    group = dist.new_group(
        [*ranks],
        timeout=_FOREVER,
        backend="fake" if _is_dry_run() else "gloo",
        use_local_synchronization=True,
        sort_ranks=False,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _close(group: dist.ProcessGroup) -> None:
    """End all waits for ranks of a group: gloo closes all its connections after a late message."""
    for other in range(group.size()):
        if other != group.rank():
            with suppress(RuntimeError):  # the message is late, or its connection is closed
                group.recv([torch.empty(1)], other, _NEVER).wait(timedelta(milliseconds=1))


def _exchange(
    group: dist.ProcessGroup, kind: str, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
) -> None:
    receives = [
        dist.irecv(memory, group=group, group_src=rank, tag=_tag_of(kind, memory))
        for rank, memory in received.items()
    ]
    sends = [
        dist.isend(part, group=group, group_dst=rank, tag=_tag_of(kind, part))
        for rank, part in sent.items()
    ]
    for work in (*receives, *sends):
        assert work is not None
        work.wait()


def _tag_of(kind: str, part: Tensor) -> int:
    """The tag of a part: ranks in operations of other kinds do not take it, but wait.

    Gloo ends a process that is sent more bytes than it has memory for.
    """
    return _PARTS + crc32(f"{kind} {part.nbytes}".encode()) % (_NEVER - _PARTS)


def _number(tag: Tag) -> int:
    """The number of a tag in torch.

    Programs share numbers from some on: no two run at once, and none leaves messages behind.
    """
    program, wire, replica = tag
    if wire >= _WIRES or replica >= _REPLICAS:
        raise IpuError(
            f"a rank can have {_WIRES} wires and {_REPLICAS} replicas, and this is wire {wire} of "
            f"replica {replica}"
        )
    return (program % _PROGRAMS * _WIRES + wire) * _REPLICAS + replica
