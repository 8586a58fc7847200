"""Know which of two copies of a model's weights is newer, the host's or an executor's.

An executor has copies of its model's weights on its device. Steps change these, the user changes
those of the host, and other executors on the same tensors have copies of their own.
"""

import os
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from ipu_dynamo.ops.private.locks import caller
from ipu_dynamo.ops.private.native import DisableTorchFunctionSubclass
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch.errors import createPoptorchError
from poptorch.replica_slices import ReplicaSlices

_Result = TypeVar("_Result")
_NONE: frozenset[str] = frozenset()


class Owner(Protocol):
    """An executor, as far as those who read its model's weights need it."""

    def copyWeightsToHostIfNeeded(self) -> bool: ...

    def destroy(self) -> None: ...


class WeightsOnDevice:
    """The weights that one executor has on its device.

    Invariant: no name is in both sets. A name is in its set before the newer value can be there,
    and leaves it when the other side has the value: a step that fails, or a copy that is
    interrupted, leaves what has to be copied.

    Args:
        owner: the executor; it is held weakly.

    Attributes:
        version: counts what others have to follow: training calls, and uploads by the user.
        newer_on_device: what the host has to fetch before somebody looks at it.
        newer_on_host: what the device has to get before it runs.
        slices: the parameters that come back with a slice for each replica.
    """

    _holder: int | None  # the thread that has the lock

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self.version = 0
        self.newer_on_device = self.newer_on_host = _NONE
        self._names = self._written = _NONE  # of the program: all, and those that calls change
        self._tensors: frozenset[int] = frozenset()  # ids of the host's, ever exchanged
        self._trained: frozenset[int] = frozenset()  # those of them that calls change
        self._trained_version = self._uploaded_version = 0
        self.slices = ReplicaSlices()
        self._make_locks()
        _all.add(self)

    @property
    def owner(self) -> Owner | None:
        """The executor, while it lives."""
        return self._owner()

    # threads

    def alone(self, action: Callable[[], _Result], *, long: bool = False) -> _Result:
        """Do something while no other thread uses the device.

        Args:
            long: a call or a compilation, which lets threads that wait for weights go first, so
                that a loop of calls does not keep them waiting for ever.

        Raises:
            poptorch.Error: another thread has the device, and waits for one that this thread has.
        """
        if self.is_mine():
            return action()
        thread = threading.get_ident()
        try:
            self._begin_to_wait(thread)
            # The interpreter looks for interrupts between calls: it is in the `with` of a lock of
            # Python's own that none can come between taking the lock and remembering to release it.
            if long:
                with self._queue:
                    pass
            with nullcontext() if long else self._queue, self._lock:
                try:
                    self._holder = caller()
                    _waiting.pop(thread, None)
                    return action()
                finally:
                    self._holder = None
        finally:
            _waiting.pop(thread, None)

    def _begin_to_wait(self, thread: int) -> None:
        """Note for whom this thread waits, unless that one waits for this thread."""
        me, looked_at, next_ones = caller(), set(), [self]
        with _looking:
            while next_ones:
                weights = next_ones.pop()
                if weights._holder == me:
                    raise createPoptorchError(
                        "two executors wait for each other: a Python operator in a call of each "
                        "reads a weight that the other one trains. Read it between the calls",
                        id="device",
                    )
                looked_at.add(weights)
                others = [w for who, w in _waiting.values() if who == weights._holder]
                next_ones += [w for w in others if w not in looked_at]
            _waiting[thread] = me, self

    def is_mine(self) -> bool:
        """Whether this thread is inside `alone`, or works for one that is."""
        return self._holder == caller()

    def _make_locks(self) -> None:
        self._holder = None
        self._lock = threading.RLock()  # a signal's handler may come before `_holder` is set
        self._queue = threading.Lock()  # held while waiting for the other one

    # what happens

    def compiled(self, core: CompiledModel) -> None:
        """Note that there is a program, which has the host's weights."""
        tensors = core.weights()
        self._names, self._written = frozenset(tensors), core.written & frozenset(tensors)
        self._tensors |= {id(tensor) for tensor in tensors.values()}
        self._trained |= {id(tensors[name]) for name in self._written}
        self.newer_on_device = self.newer_on_host = _NONE

    def steps_begin(self) -> None:
        """Note that a call may change the device's weights, complete or not."""
        self.version += 1
        self._trained_version = self.version
        if self.newer_on_device is not self._written:
            self.newer_on_device |= self._written

    def device_wins(self) -> None:
        """Let the host get all of the device's weights."""
        self.newer_on_device = self._names - self.newer_on_host

    def host_wins(self, names: Collection[str] | None = None) -> None:
        """Let the device get the host's weights, all of them or those with the given names."""
        names = self._names if names is None else self._names & frozenset(names)
        self.newer_on_host |= names
        self.newer_on_device -= names

    def uploaded(self) -> None:
        """Note that others have to follow what the user has put on the device."""
        self.version += 1
        self._uploaded_version = self.version

    def changed_since(self, version: int) -> frozenset[int]:
        """The ids of the host's tensors that have got new values on this device since."""
        changed = self._trained if self._trained_version > version else frozenset()
        return changed | self._tensors if self._uploaded_version > version else changed

    # copying

    def fetch(self, core: CompiledModel) -> None:
        """Copy to the host what is newer on the device."""
        if names := self.newer_on_device:
            tensors = core.weights()
            fetched = {id(tensors[name]) for name in names}
            with (
                host_tensors(),
                DisableTorchFunctionSubclass(),
                self.slices.one_for_each_group(fetched),
            ):
                core.read_weights(names)
            self.newer_on_device = _NONE

    def send(self, core: CompiledModel) -> None:
        """Copy to the device what is newer on the host."""
        if names := self.newer_on_host:
            with (
                host_tensors(),
                DisableTorchFunctionSubclass(),
                self.slices.one_for_each_group(),
            ):
                core.write_weights(names)
            self.newer_on_host = _NONE

    def refresh(self) -> None:
        """Bring the host's weights up to date; the executor's own code sees them as they are.

        So does a compilation, which has followed this one before, and follows it again later: it
        holds locks that come after the lock of this one.
        """
        if not self.newer_on_device or self.is_mine() or self in getattr(_here, "followed", ()):
            return
        if (owner := self.owner) is not None:
            owner.copyWeightsToHostIfNeeded()


def host_tensors() -> AbstractContextManager[bool]:
    """The lock to hold while weights of the host are copied, or change their class.

    It is taken last: who holds it touches no module or tensor that another executor trains, since
    that may wait for the executor's lock.
    """
    return _locks[0]


class Following:
    """A block in which this thread leaves the host's weights as those who train them made them.

    Args:
        followed: those who train.
    """

    def __init__(self, followed: Collection[WeightsOnDevice]) -> None:
        self._followed = frozenset(followed)

    def __enter__(self) -> None:
        self._before = getattr(_here, "followed", _NOBODY)
        _here.followed = self._before | self._followed

    def __exit__(self, *error: object) -> None:
        _here.followed = self._before


_here = threading.local()
_NOBODY: frozenset[WeightsOnDevice] = frozenset()
_locks = [threading.RLock()]
_looking = threading.RLock()  # guards what follows
_waiting: "dict[int, tuple[int, WeightsOnDevice]]" = {}  # thread -> its caller, for which device
_all: "weakref.WeakSet[WeightsOnDevice]" = weakref.WeakSet()


def _after_fork() -> None:
    """Free a child process of locks that threads hold which it has not."""
    global _looking
    _locks[0], _looking = threading.RLock(), threading.RLock()
    _waiting.clear()
    for weights in list(_all):
        weights._make_locks()


os.register_at_fork(after_in_child=_after_fork)
