"""Run the ranks of a mesh as threads of one process, with messages in memory.

A rank that waits for one that has ended gets an error, so no rank hangs.

Example:
    def half(transport):
        return transport.maximum("mesh", torch.tensor([transport.share.rank]))

    assert run_ranks(1, 2, half) == [torch.tensor([1]), torch.tensor([1])]
"""

import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ipu_dynamo.errors import IpuError, RankLost
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.changes import Changes
from ipu_dynamo.runtime.ranks.transport import Among, Group, Tag
from ipu_dynamo.tune.intra_op import intra_op_threads

_Result = TypeVar("_Result")
_SECONDS = 60.0  # until ranks that still run are given up
_LOOK = 1.0  # seconds
_here = threading.local()


def run_ranks(
    rows: int,
    columns: int,
    run: Callable[["MemoryTransport"], _Result],
    *,
    seconds: float = _SECONDS,
    here: int | None = None,
) -> list[_Result]:
    """Call `run` on every rank of a mesh, each in a thread with one intra-op thread.

    Args:
        seconds: until ranks that still run are given up.
        here: the rank that runs in the calling thread, where signals arrive; None: none does.

    Returns:
        The results, by ranks.

    Raises:
        Exception: the first error of a rank.
        TimeoutError: ranks did not end in time; it names the last action of each.
    """
    results, errors = _run(rows, columns, run, seconds, here)
    if errors:
        raise next(iter(errors.values()))
    return [results[rank] for rank in range(rows * columns)]


def run_failing_ranks(
    rows: int,
    columns: int,
    run: Callable[["MemoryTransport"], _Result],
    *,
    seconds: float = _SECONDS,
    here: int | None = None,
) -> list[_Result | BaseException]:
    """The same, with the error of each rank that raised one in the place of its result."""
    results, errors = _run(rows, columns, run, seconds, here)
    return [errors[r] if r in errors else results[r] for r in range(rows * columns)]


def transport_here() -> "MemoryTransport | None":
    """The transport of the rank whose thread calls this; None in other threads."""
    transport: MemoryTransport | None = getattr(_here, "transport", None)
    return transport


def _run(
    rows: int,
    columns: int,
    run: Callable[["MemoryTransport"], _Result],
    seconds: float,
    here: int | None,
) -> tuple[dict[int, _Result], dict[int, BaseException]]:
    """The results and the errors of ranks, in the order in which they ended."""
    mesh, results, errors = _MeshOfThreads(), dict[int, _Result](), dict[int, BaseException]()

    def run_rank(transport: MemoryTransport) -> None:
        rank = transport.share.rank
        _here.transport = transport
        try:
            with intra_op_threads(1):
                results[rank] = run(transport)
        except BaseException as error:
            errors[rank] = error
        finally:
            _here.transport = None
            mesh.changes.make(lambda: mesh.ended.add(rank))

    def give_up() -> None:
        mesh.changes.make(lambda: mesh.ended.update(ranks))

    ranks = range(rows * columns)
    transports = [
        MemoryTransport(Share(rows, columns, *divmod(rank, columns)), mesh) for rank in ranks
    ]
    threads = {
        t.share.rank: threading.Thread(
            target=run_rank, args=(t,), name=f"rank {t.share.rank}", daemon=True
        )
        for t in transports
        if t.share.rank != here
    }
    timer = threading.Timer(seconds, give_up)
    try:
        for thread in threads.values():
            thread.start()
        if here is not None:
            timer.start()  # this thread ends then, too
            run_rank(transports[here])
        if not mesh.changes.wait_for(lambda: len(mesh.ended) == len(ranks), seconds):
            late = [rank for rank in ranks if rank not in mesh.ended]
            places = "".join(_place(rank, threads[rank]) for rank in late)
            raise TimeoutError(f"ranks {late} have not ended after {seconds:g} seconds{places}")
    finally:  # threads that still wait end
        timer.cancel()
        give_up()
    return results, errors


def _place(rank: int, thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"\nrank {rank}:\n{''.join(traceback.format_stack(frame)) if frame else 'gone'}"


@dataclass
class _MeshOfThreads:
    """The messages between ranks that are not complete, and the ranks that have ended.

    `sent` and `wanted` are by (sender, receiver, tag), `given` by the ranks of a group and the
    number of the collective.
    """

    changes: Changes = field(default_factory=Changes)
    sent: defaultdict[tuple[int, int, Tag], deque["_Message"]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    wanted: defaultdict[tuple[int, int, Tag], deque["_Message"]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    given: dict[tuple[Sequence[int], int], dict[int, Any]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def wait(self, ready: Callable[[], bool], others: Callable[[], Iterable[int]]) -> None:
        """Wait until `ready`, which `others` bring about."""

        def gone() -> Set[int]:
            return self.ended & {*others()}

        while not self.changes.wait_for(lambda: ready() or bool(gone()), _LOOK):
            pass
        lost = gone()  # before `ready`: all actions of these ranks are visible by now
        if not ready():
            raise RankLost("a rank has ended, and others wait for it", rank=min(lost))


@dataclass(eq=False)
class _Message:
    """One end of a message: it is complete once both ends are there."""

    memory: Tensor
    other: int
    mesh: _MeshOfThreads
    complete: bool = False
    error: str = ""

    def wait(self) -> None:
        self.mesh.wait(lambda: self.complete, lambda: (self.other,))
        if self.error:
            raise ValueError(self.error)


def _hand_over(sent: _Message, wanted: _Message) -> None:
    source, target = sent.memory, wanted.memory
    if source.numel() == target.numel():
        target.copy_(source)
    else:
        problem = f"a message of {source.numel()} bytes came, and not of {target.numel()}"
        sent.error = wanted.error = problem
    sent.complete = wanted.complete = True


class MemoryTransport:
    """The transport of one rank.

    As with gloo, a send is complete once the other rank has begun to receive it.
    """

    def __init__(self, share: Share, mesh: _MeshOfThreads) -> None:
        self.share, self._mesh = share, mesh
        self._collectives: dict[Sequence[int], int] = {}  # of each group, how many have begun

    def operation(self, among: Group, kind: str, text: str) -> AbstractContextManager[None]:
        """Note a common operation of the ranks; nothing is needed here."""
        return nullcontext()

    def follow(self, lost: Callable[[IpuError], None]) -> None:
        """Do nothing: a wait for a rank that has ended gets an error itself."""

    def abandon(self, problem: str) -> IpuError:
        """Give up the mesh: this rank counts as ended."""
        self._mesh.changes.make(lambda: self._mesh.ended.add(self.share.rank))
        return RankLost(problem, rank=self.share.rank)

    def send(self, to: int, tag: Tag, message: Tensor) -> _Message:
        """Send a message. Never waits."""
        return self._meet((self.share.rank, to, tag), message, to, sends=True)

    def receive(self, source: int, tag: Tag, message: Tensor) -> _Message:
        """Receive the next message of a tag into this memory."""
        return self._meet((source, self.share.rank, tag), message, source, sends=False)

    def _meet(
        self, place: tuple[int, int, Tag], memory: Tensor, other: int, *, sends: bool
    ) -> _Message:
        _check(memory)
        own = _Message(memory, other, self._mesh)

        def match() -> None:
            mine, theirs = self._mesh.sent[place], self._mesh.wanted[place]
            if not sends:
                mine, theirs = theirs, mine
            if theirs:
                first = theirs.popleft()
                _hand_over(*(own, first) if sends else (first, own))
            else:
                mine.append(own)

        self._mesh.changes.make(match)
        return own

    def gather(self, among: Among, part: Tensor, into: Tensor | None = None) -> Tensor:
        """Give every rank the parts of all, which have one size."""
        _check(part)
        given = self._together(among, f"gather of {part.numel()} bytes", part.clone())
        if into is None:
            into = part.new_empty(len(given) * part.numel())
        _check(into)
        return into.copy_(torch.cat(given)).view(len(given), part.numel())

    def exchange(
        self, among: Among, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> None:
        """Send parts to other ranks of a group, and receive theirs."""
        for part in (*sent.values(), *received.values()):
            _check(part)
        copies = {place: part.clone() for place, part in sent.items()}
        given = self._together(among, "exchange", copies)
        own = self._ranks(among).index(self.share.rank)
        for place, memory in received.items():
            part = given[place][own]
            if part.numel() != memory.numel():
                problem = f"{part.numel()} bytes came, and not {memory.numel()}"
                raise ValueError(f"of the rank at place {place}, {problem}")
            memory.copy_(part)

    def maximum(self, among: Among, values: Tensor) -> Tensor:
        """The largest value of all ranks at each place; values are int64."""
        assert values.dtype == torch.int64
        given = self._together(among, f"maximum of {values.numel()} values", values.clone())
        return torch.stack(given).amax(0)

    def broadcast(self, among: Among, message: Tensor) -> None:
        """Overwrite a message with that of the first rank of the group."""
        _check(message)
        kind = f"broadcast of {message.numel()} bytes"
        message.copy_(self._together(among, kind, message.clone())[0])

    def _ranks(self, among: Among) -> range:
        share = self.share
        of = {"row": share.of_row, "column": share.of_column, "mesh": range(share.ranks)}
        return of[among]

    def _together(self, among: Among, kind: str, value: Any) -> list[Any]:
        """Give a value to all ranks of a group; returns those of all, by their order."""
        ranks, mesh = self._ranks(among), self._mesh
        given: dict[int, Any] = {}

        def give() -> None:
            nonlocal given
            number = self._collectives[ranks] = self._collectives.get(ranks, 0) + 1
            given = mesh.given.setdefault((ranks, number), {})
            given[self.share.rank] = kind, value
            if len(given) == len(ranks):
                del mesh.given[ranks, number]

        with DeferredSignals():  # an interrupt comes before or after it
            mesh.changes.make(give)
        mesh.wait(lambda: len(given) == len(ranks), lambda: [r for r in ranks if r not in given])
        if len({each for each, _ in given.values()}) > 1:
            kinds = {rank: given[rank][0] for rank in ranks}
            raise ValueError(f"ranks of a {among} make different collectives: {kinds}")
        return [given[rank][1] for rank in ranks]


def _check(memory: Tensor) -> None:
    assert memory.dtype == torch.uint8
    assert memory.dim() == 1
    assert memory.is_contiguous()
