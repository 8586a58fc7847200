"""Notice ranks that are gone, that stand still, or that are in another operation.

Each rank writes a *beat* into a store once a second. A rank that waits for others reads theirs:

- a beat says that its rank has left: nothing will come;
- a beat is older than the limit, or older than a few beats after a connection broke: the rank is
  gone;
- two ranks are in operations that cannot both end. Ranks begin the operations of a mesh in one
  order, and those of a row in one order. So operations are compared by number, never by time.

The rank that finds this out writes a record, and all ranks raise its error. A rank that waits for a
live one waits on.
"""

import json
import logging
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic, sleep
from typing import Any, Protocol
from weakref import WeakMethod

from ipu_dynamo.errors import IpuError, OptionError, RankLost, RanksDiffer
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.ranks.transport import Group

_VARIABLE = "IPU_DYNAMO_RANK_TIMEOUT"
_FAILURE = "failure"  # the key of the record
_BROKEN = 2.5  # beats without a new one, after which a rank with a broken connection is gone
_GIVE_UP = 5  # beats, after which the rank of a broken connection stays unknown
_LAUNCHER = 2.0  # seconds; torchrun notices within them which rank ended first
_PATIENT = 30.0  # seconds until a wait for a live rank is logged, and rank 0 leaves before others
_AGAIN = 60.0  # seconds between such lines
_CROSSED = "ranks wait for each other in different operations"
_HINT = "let all ranks make the same calls in the same order"
_log = logging.getLogger("ipu_dynamo")


class BeatStore(Protocol):
    """The methods of torch's TCPStore that watches call. They may block without end, or raise."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...

    def compare_set(self, key: str, expected: str, value: str) -> bytes: ...


@dataclass(frozen=True)
class JointOperation:
    """An operation of several ranks.

    Args:
        among: the ranks that take part.
        number: of the operation among these.
        kind: ranks with different kinds wait for each other without end.
        text: as in "rank 0 is in call 17".
    """

    among: Group
    number: int
    kind: str
    text: str


@dataclass(eq=False)
class _Wait:
    """A wait for ranks. `problem`: how a connection to one of them broke."""

    ranks: frozenset[int]
    since: float = field(default_factory=monotonic)
    problem: str = ""
    told: float = 0.0  # seconds of the wait when it was logged last


class Watch:
    """The watch of one rank.

    A thread of its own talks to the store. Another one judges by this rank's clock, because the
    store may not answer.

    Args:
        share: the place of the rank.
        limit: seconds without a beat, after which a rank is gone for those that wait for it; 0 for
            none.
        interval: seconds between beats.

    Attributes:
        lost: the error that ended the mesh. It never changes once it is set.
    """

    def __init__(self, share: Share, *, limit: float, interval: float = 1.0) -> None:
        self._share, self._limit, self._interval = share, limit, interval
        self.lost: IpuError | None = None
        self._host = socket.gethostname()
        self._number = 0
        self._begun = Counter[Group]()
        self._kinds = Counter[str]()
        self._now: list[JointOperation] = []  # the innermost last
        self._waits: set[_Wait] = set()
        self._seen: dict[int, tuple[int, float]] = {}  # the number of a beat, and when it was new
        self._hosts: dict[int, str] = {}
        self._followers: list[WeakMethod[Callable[[IpuError], None]]] = []
        self._error: IpuError | None = None  # becomes `lost`
        self._left = ""  # how this rank has ended
        self._answered = monotonic()
        self._is_served = False
        self._lock = threading.Lock()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._talks: list[threading.Thread] = []  # with the store

    def start(self, store: BeatStore) -> None:
        """Write the first beat, and go on.

        Args:
            store: serves all ranks; rank 0 has it.
        """
        self._store, self._is_served = store, True
        self._write()
        self._start(self._talk)
        threading.Thread(target=self._judge, name="watch of ranks", daemon=True).start()

    def _start(self, talk: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=talk, name="store of ranks", daemon=True)
        self._talks.append(thread)
        thread.start()
        return thread

    def follow(self, lost: Callable[[IpuError], None]) -> None:
        """Call a method in another thread once the mesh is lost. Its object may cease to exist."""
        with self._lock:
            self._followers = [each for each in self._followers if each() is not None]
            self._followers.append(WeakMethod(lost))
        if self.lost is not None:
            lost(self.lost)

    @contextmanager
    def operation(self, among: Group, kind: str, text: str) -> Iterator[None]:
        """Say what this rank does with others.

        Raises:
            RankLost, RanksDiffer: the mesh was lost before.
        """
        if self.lost is not None:
            raise self.lost
        self._begun[among] += 1
        self._kinds[kind] += 1
        operation = JointOperation(among, self._begun[among], kind, text)
        self._now.append(operation)
        try:
            yield
        finally:
            self._now.remove(operation)

    @property
    def kind(self) -> str:
        """The kind of the operation that this rank is in; empty outside of one."""
        return self._now[-1].kind if self._now else ""

    @contextmanager
    def waiting(self, ranks: Collection[int]) -> Iterator[_Wait]:
        """Say that a thread waits for ranks."""
        wait = _Wait(frozenset(ranks))
        self._waits.add(wait)
        try:
            yield wait
        finally:
            self._waits.discard(wait)

    @property
    def has_waits(self) -> bool:
        """Whether any thread waits for a message of other ranks."""
        return any(not wait.problem for wait in list(self._waits))

    def cause(self, ranks: Collection[int], problem: str) -> IpuError:
        """Find out why a connection to one of these ranks broke; takes a few beats."""
        if self._left:
            return RankLost(problem)  # this rank has closed the connection itself
        if self._error is None:
            _log.error("%s", problem)  # at once: a launcher may end this process
        with self.waiting(ranks) as wait:
            wait.problem = problem
            self._wake.set()
            while (
                self._is_served
                and self.lost is None
                and monotonic() - wait.since < _GIVE_UP * self._interval
            ):
                self._ended.wait(self._interval / 4)
        if self.lost is None:
            if not self._is_served and (0 in ranks or self._needs_first()):
                self._lose_first()
            elif len(ranks) == 1:
                (rank,) = ranks
                self._lose_rank(rank, f"rank {rank} is gone: {problem}; {self._place()}")
            else:
                self._lose(RankLost(problem))
        assert self.lost is not None
        return self.lost

    def abandon(self, problem: str) -> IpuError:
        """Lose the mesh through this rank; returns the error of all ranks."""
        self._lose(RankLost(problem, rank=self._share.rank, host=self._host))
        assert self.lost is not None
        return self.lost

    def leave(self) -> None:
        """Write a last beat, which says that this rank has ended, and use the store no more."""
        error = getattr(sys, "last_value", None)
        calls = sum(count for kind, count in self._kinds.items() if kind.startswith("call"))
        self._left = f"made {calls} call{'s' * (calls != 1)} and left"
        if error is not None:
            self._left = f"ended with {type(error).__name__}: {error}"
        self._wake.set()
        if self.lost is not None:  # and this rank writes no more beats
            self._start(self._write_last)
        end = monotonic() + _GIVE_UP * self._interval  # no later: the store may not answer
        for talk in self._talks:
            talk.join(max(0.0, end - monotonic()))
        if self._share.rank == 0:  # others may have to read why this rank has ended
            if self.lost is None:
                end += _PATIENT
            while self._is_served and not self._all_have_left() and monotonic() < end:
                sleep(self._interval / 20)

    def _write_last(self) -> None:
        with suppress(RuntimeError):  # the store is gone
            self._write()

    def _all_have_left(self) -> bool:
        beats = (self._beat(rank) for rank in range(1, self._share.ranks))
        return all(beat is None or beat["left"] for beat in beats)

    def _write(self) -> None:
        self._number += 1
        now = self._now[-1:]
        beat = {
            "number": self._number,
            "host": self._host,
            "begun": dict(self._begun),
            "now": [[o.among, o.number, o.kind, o.text] for o in now],
            "left": self._left,
        }
        self._store.set(f"beat {self._share.rank}", json.dumps(beat))

    def _talk(self) -> None:
        """Write beats, and read those of other ranks."""
        while self.lost is None:
            ends = bool(self._left)
            try:
                self._write()
                if 0 not in self._hosts and (first := self._beat(0)) is not None:
                    self._hosts[0] = first["host"]  # later its store may be gone
                if self._store.check([_FAILURE]):
                    self._take_record(self._store.get(_FAILURE))
                elif not ends:
                    for rank in sorted({rank for wait in self._due() for rank in wait.ranks}):
                        self._look_at(rank)
                self._answered = monotonic()
            except RuntimeError:  # torch's errors of a store
                self._is_served = False
                break
            if ends:
                break
            is_broken = any(wait.problem for wait in list(self._waits))
            self._wake.wait(self._interval / 4 if is_broken else self._interval)
            self._wake.clear()
        if self._left or self.lost is not None:
            self._ended.set()

    def _due(self) -> list[_Wait]:
        """The waits that are worth a look."""
        now = monotonic()
        return [w for w in list(self._waits) if w.problem or now - w.since > 2 * self._interval]

    def _beat(self, rank: int) -> dict[str, Any] | None:
        """The last beat of a rank; None before its first."""
        key = f"beat {rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _look_at(self, rank: int) -> None:
        """Read the beat of a rank that this one waits for, and judge."""
        if (beat := self._beat(rank)) is None:
            return  # it connects
        now, waits = monotonic(), [w for w in self._due() if rank in w.ranks]
        self._hosts[rank] = beat["host"]
        if self._seen.get(rank, (0, 0.0))[0] != beat["number"]:
            self._seen[rank] = beat["number"], now
        silent = now - self._seen[rank][1]
        places = f"it was in {_text_of(beat)}, and {self._place()}"
        if beat["left"]:
            self._lose_rank(rank, f"rank {rank} {beat['left']}; {self._place()}")
        elif self._limit and silent > self._limit:
            problem = f"rank {rank} has shown no sign of life for {silent:.0f} seconds"
            problem = f"{problem}: it was stopped, or its host or link is gone"
            self._lose_rank(rank, f"{problem}; {places}")
        elif (broken := [w for w in waits if w.problem]) and silent > _BROKEN * self._interval:
            self._lose_rank(rank, f"rank {rank} is gone: {broken[0].problem}; {places}")
        else:
            self._compare(rank, beat)
            for wait in waits:
                self._tell(rank, beat, wait)

    def _compare(self, rank: int, beat: dict[str, Any]) -> None:
        """Lose the mesh if this rank and another one wait for each other in operations."""
        same_row = rank in self._share.of_row
        for theirs in (JointOperation(*fields) for fields in beat["now"]):
            for own in self._now[-1:]:
                if not same_row and "row" in (own.among, theirs.among):
                    continue  # one of them does not take part
                not_here = theirs.number > self._begun[theirs.among]
                not_there = own.number > beat["begun"].get(own.among, 0)
                same = (own.among, own.number) == (theirs.among, theirs.number)
                if (not_here and not_there) or (same and own.kind != theirs.kind):
                    texts = {self._share.rank: own.text, rank: theirs.text}
                    self._lose(RanksDiffer(_CROSSED, texts, hint=_HINT))

    def _tell(self, rank: int, beat: dict[str, Any], wait: _Wait) -> None:
        """Log now and then that a wait goes on."""
        lasts = monotonic() - wait.since
        if lasts > (wait.told + _AGAIN if wait.told else _PATIENT):
            wait.told = lasts
            _log.warning(
                "rank %d has waited %.0f s for rank %d (%s), which is in %s",
                self._share.rank, lasts, rank, beat["host"], _text_of(beat),
            )  # fmt: skip

    def _judge(self) -> None:
        """Lose the mesh if the store does not answer and this rank waits for others."""
        while self.lost is None and not self._left:
            due, silent = self._due(), monotonic() - self._answered
            waits_for_first = any(0 in wait.ranks for wait in due)
            too_long = bool(self._limit) and silent > self._limit
            if due and (too_long or (waits_for_first and not self._is_served)):
                self._lose_first()
            sleep(self._interval / 2)

    def _place(self) -> str:
        """The operation of this rank."""
        text = self._now[-1].text if self._now else "no operation"
        return f"rank {self._share.rank} is in {text}"

    def _needs_first(self) -> bool:
        """Whether rank 0 takes part in the operation of this rank."""
        return any(o.among == "mesh" or 0 in self._share.of_row for o in self._now[-1:])

    def _lose_first(self) -> None:
        problem = "rank 0, or its host, is gone: its store does not answer"
        self._lose_rank(0, f"{problem}; {self._place()}")

    def _lose_rank(self, rank: int, problem: str) -> None:
        self._lose(RankLost(problem, rank=rank, host=self._hosts.get(rank)))

    def _lose(self, error: RankLost | RanksDiffer) -> None:
        """Write the record, unless another rank has; then raise its error in all waits."""
        record: dict[str, Any] = {"problem": error.problem, "rank": error.rank, "host": error.host}
        if isinstance(error, RanksDiffer):
            record["values"] = {str(rank): text for rank, text in error.values.items()}
        if self._is_served:
            writing = self._start(partial(self._publish, json.dumps(record)))
            writing.join(self._interval)  # no longer: the store may not answer
        self._end(error)

    def _publish(self, record: str) -> None:
        try:
            self._take_record(self._store.compare_set(_FAILURE, "", record))
        except RuntimeError:
            self._is_served = False

    def _take_record(self, written: bytes) -> None:
        """Raise from now on the error that a rank wrote first."""
        record = json.loads(written)
        error: RankLost | RanksDiffer
        if values := record.pop("values", None):
            texts = {int(rank): text for rank, text in values.items()}
            error = RanksDiffer(record["problem"], texts, hint=_HINT)
        else:
            error = RankLost(**record)
        self._end(error)

    def _end(self, error: IpuError) -> None:
        """Lose the mesh. Under torchrun this takes a while, so that it can name the lost rank."""
        with self._lock:
            is_first, self._error = self._error is None, self._error or error
        if "TORCHELASTIC_RUN_ID" in os.environ:
            if is_first:
                _log.error("%s", error)
            sleep(_LAUNCHER)
        with self._lock:
            if self.lost is not None:
                return
            self.lost = self._error
            followers = list(self._followers)
        self._ended.set()
        for follower in followers:
            if (lost := follower()) is not None:
                lost(self._error)


def _text_of(beat: dict[str, Any]) -> str:
    """The operation of a rank."""
    return beat["now"][-1][3] if beat["now"] else "no operation of the mesh"


def limit_of_environment() -> float:
    """The seconds without a beat after which a rank is gone; 0 for none.

    Raises:
        OptionError: the environment variable has another value.
    """
    text = os.environ.get(_VARIABLE, "60")
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < inf:
        raise OptionError(f"{_VARIABLE} must be seconds, or 0 for no limit, and is {text!r}")
    return limit
