"""Carry messages between ranks that are processes, over torch.distributed.

This module makes groups of its own. Their timeout is longer than any run, as it would end waits
for ranks that are only slow. Threads of their own wait in torch, because torch notices no signals
there.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ipu_dynamo.errors import IpuError, RankLost
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.changes import Changes
from ipu_dynamo.runtime.ranks.transport import Among, Tag

_FOREVER = timedelta(days=300)
_LOOK = 1.0  # seconds
_PROGRAMS, _WIRES, _REPLICAS = 31, 1 << 16, 1 << 10  # below 31 bits together, as torch's tags are
_PARTS = _PROGRAMS * _WIRES * _REPLICAS  # the tag of parts that are gathered


@dataclass(eq=False)
class _Job:
    """A collective that the transport's thread makes."""

    work: Callable[[], Any]
    ended: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass(eq=False, frozen=True)
class _Sent:
    """A message that is under way, with its memory."""

    memory: Tensor
    work: dist.Work
    other: int

    def wait(self) -> None:
        with _Lost(self.other):
            self.work.wait()


@dataclass(frozen=True)
class _Lost:
    """Says that a rank is gone where torch reports a broken connection."""

    rank: int | None

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            text = str(error).strip().splitlines()[0]
            raise RankLost(
                f"a connection between ranks has ended: {text}", rank=self.rank
            ) from error


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
        members: dict[Among, range] = {
            "mesh": range(share.ranks),
            "row": share.of_row,
            "column": share.of_column,
        }
        self._members, self._connecting = members, threading.Lock()
        self._groups: Mapping[Among, dist.ProcessGroup | None] = {}

    def send(self, to: int, tag: Tag, message: Tensor) -> _Sent:
        """Send a message. Never waits."""
        group = self._group("mesh")
        with _Lost(to):
            work = dist.isend(message, group=group, group_dst=to, tag=_number(tag))
        assert work is not None
        return _Sent(message, work, to)

    def receive(self, source: int, tag: Tag, message: Tensor) -> _Sent:
        """Receive the next message of a tag into this memory."""
        group = self._group("mesh")
        with _Lost(source):
            work = dist.irecv(message, group=group, group_src=source, tag=_number(tag))
        assert work is not None
        return _Sent(message, work, source)

    def gather(self, among: Among, part: Tensor, into: Tensor | None = None) -> Tensor:
        """Give every rank the parts of all, which have one size."""
        ranks, group = len(self._members[among]), self._group(among)
        if into is None:
            into = part.new_empty(ranks * part.numel())
        parts = into.view(ranks, part.numel())
        place = self._members[among].index(self.share.rank)
        parts[place].copy_(part)
        if group is not None and part.numel():
            others = [other for other in range(ranks) if other != place]
            self._call(lambda: _hand_round(group, part, {o: parts[o] for o in others}))
        return parts

    def exchange(
        self,
        among: Among,
        message: Tensor,
        sizes: Sequence[int],
        received: Sequence[int],
        into: Tensor | None = None,
    ) -> Tensor:
        """Send each rank a part of the message, and get a part of each."""
        group = self._group(among)
        if into is None:
            into = message.new_empty(sum(received))
        if group is None:
            into.copy_(message)
        else:
            out, given = [*received], [*sizes]
            self._call(lambda: dist.all_to_all_single(into, message, out, given, group))
        return into

    def maximum(self, among: Among, values: Tensor) -> Tensor:
        """The largest value of all ranks at each place; values are int64."""
        largest, group = values.clone(), self._group(among)
        if group is not None:
            self._call(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX, group))
        return largest

    def broadcast(self, among: Among, message: Tensor) -> None:
        """Overwrite a message with that of the first rank of the group."""
        group = self._group(among)
        if group is not None:
            self._call(lambda: dist.broadcast(message, group=group, group_src=0))

    def _group(self, among: Among) -> dist.ProcessGroup | None:
        if os.getpid() != self._process:
            raise IpuError(
                "a forked process has no mesh, and cannot exchange anything with ranks\n"
                "  try:  call the program in the process that compiled it"
            )
        with self._connecting:
            if not self._groups:
                self._connect()
        return self._groups[among]

    def _connect(self) -> None:
        """Make the groups, together with all ranks."""
        threading.Thread(target=self._work, name="collectives of ranks", daemon=True).start()
        groups: dict[Among, dist.ProcessGroup | None] = {}
        for among, of in self._members.items():
            if len(of) == self.share.ranks and among != "mesh":
                groups[among] = groups["mesh"]
            else:
                groups[among] = self._call(partial(_group, [self._ranks[r] for r in of]))
        self._groups = groups

    def _call(self, work: Callable[[], Any]) -> Any:
        """Let the transport's thread do something after all before it; returns its result."""
        job = _Job(work)
        self._jobs.put(job)  # one operation: an interrupt comes before or after it
        while not self._changes.wait_for(lambda: job.ended, _LOOK):
            pass
        if job.error is not None:
            raise job.error
        return job.result

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                with _Lost(None):
                    job.result = job.work()
            except BaseException as error:  # the caller raises it
                job.error = error

            def end(job: _Job = job) -> None:
                job.ended = True

            self._changes.make(end)


def _group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a group whose members have this order; None for a single one."""
    if len(ranks) == 1:
        return None
    group = dist.new_group(
        [*ranks],
        timeout=_FOREVER,
        backend="gloo",
        use_local_synchronization=True,
        sort_ranks=False,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _hand_round(group: dist.ProcessGroup, part: Tensor, parts: Mapping[int, Tensor]) -> None:
    """Send a part to some ranks, and receive theirs.

    `all_gather_single` of gloo takes 3.5 times as long for 50 MB.
    """
    works = [
        dist.irecv(theirs, group=group, group_src=rank, tag=_PARTS)
        for rank, theirs in parts.items()
    ]
    works += [dist.isend(part, group=group, group_dst=rank, tag=_PARTS) for rank in parts]
    for work in works:
        assert work is not None
        work.wait()


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
