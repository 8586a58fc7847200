"""Know which of two copies of variables is newer, the host's or the device's, under one lock.

A program may compute on copies of its model's tensors. Its steps change the device's copies, users
change the host's, and other programs on the same tensors have copies of their own. The design is
that of `Kokkos::DualView`: a side is marked before it is modified, and copied to the other side
when somebody needs that.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from torch import Tensor

from ipu_dynamo.ops.private.locks import QueueLock

_NONE: frozenset[str] = frozenset()


class Exchange(Protocol):
    """Copies variables from the host to a device and back, such as a `CompiledModel`."""

    @property
    def written(self) -> frozenset[str]:
        """The names of the variables that steps change."""

    def weights(self) -> Mapping[str, Tensor]:
        """The host's tensor of each variable."""

    def has_weights(self) -> bool:
        """Whether the device's values are those of a complete step."""

    def read_weights(self, names: Collection[str]) -> None:
        """Copy variables from the device to the host."""

    def write_weights(self, names: Collection[str]) -> None:
        """Copy variables from the host to the device."""


class DualView:
    """The host's and a device's copies of the variables of one program after another.

    Invariant: no name is in both sets. A name is in its set before the newer value can exist, and
    leaves it when the other side has the value. So a step that fails, or a copy that is
    interrupted, leaves a name that has to be copied.

    A caller of a method that modifies or copies holds `lock`. `fetch`, `refresh` and
    `changed_since` may be called at any time.

    Args:
        owner: of the program; it is held weakly. Other threads leave a view alone whose owner is
            freed.
        refusal: makes the error of a thread that asks for the lock and would never get it.

    Attributes:
        lock: orders calls, reads and writes of several threads.
        newer_on_device: the names of variables to copy before the host's are read.
        newer_on_host: the names of variables to copy before a step.
        version: the number of changes that other views on the same tensors follow.
    """

    def __init__(self, owner: Any, refusal: Callable[[], Exception] | None = None) -> None:
        self._owner = weakref.ref(owner)
        self.lock = QueueLock(refusal)
        self.newer_on_device = self.newer_on_host = _NONE
        self.version = 0
        self._exchange: Exchange | None = None
        self._names = self._written = _NONE
        # The ids of the host's tensors, of all programs so far: all, and those that steps change.
        self._tensors: frozenset[int] = frozenset()
        self._trained: frozenset[int] = frozenset()
        self._trained_version = self._published_version = 0
        self._writes: dict[str, int] = {}  # to the host's tensors, as torch counts them

    @property
    def owner(self) -> Any:
        """The owner of the program, while it lives, else None."""
        return self._owner()

    def connect(self, exchange: Exchange) -> None:
        """Take on a new program, which has the host's values."""
        tensors = exchange.weights()
        self._names, self._written = frozenset(tensors), exchange.written & frozenset(tensors)
        self._tensors |= {id(tensor) for tensor in tensors.values()}
        self._trained |= {id(tensors[name]) for name in self._written}
        self.newer_on_device = self.newer_on_host = _NONE
        self._exchange = exchange

    def disconnect(self) -> None:
        """Drop the program. Values that were not copied are lost."""
        self.newer_on_device = self.newer_on_host = _NONE
        self._exchange = None

    def modify_device(self) -> None:
        """Mark the variables that steps change, before a call that may complete some steps.

        `sync_device` comes before: no variable that steps change is newer on the host.
        """
        assert not self.newer_on_host & self._written, "the host's values would be lost"
        self.version += 1
        self._trained_version = self.version
        if not self.newer_on_device:
            self.newer_on_device = self._written  # one object, so that later calls need no union
        elif self.newer_on_device is not self._written:
            self.newer_on_device |= self._written

    def modify_all_on_device(self) -> None:
        """Mark all of the device's values as newer, but those that the host has changed."""
        self.newer_on_device = self._names - self.newer_on_host

    def modify_host(self, names: Collection[str] | None = None) -> None:
        """Mark all of the host's values as newer, or those with the given names."""
        names = self._names if names is None else self._names & frozenset(names)
        self.newer_on_host |= names
        self.newer_on_device -= names

    def count_host_writes(self) -> frozenset[str]:
        """Return the names of the host's tensors that were written since this was called last."""
        assert self._exchange is not None
        before, tensors = self._writes, self._exchange.weights()
        self._writes = {name: tensor._version for name, tensor in tensors.items()}
        return frozenset(n for n, count in self._writes.items() if before.get(n) != count)

    def publish(self) -> None:
        """Let other views follow all values that the device has now."""
        self.version += 1
        self._published_version = self.version

    def follow(self, tensors: Collection[int]) -> None:
        """Mark host tensors, given by their ids, that another view's device has changed."""
        if self._exchange is not None:
            own = self._exchange.weights()
            names = {name for name, tensor in own.items() if id(tensor) in tensors}
            self.modify_host(names - self.newer_on_device)

    def changed_since(self, version: int) -> frozenset[int]:
        """The ids of the host's tensors whose values this device has changed since `version`."""
        changed = self._trained if self._trained_version > version else frozenset()
        return changed | self._tensors if self._published_version > version else changed

    def sync_host(self, *, required: bool = False) -> bool:
        """Copy to the host the variables that are newer on the device.

        Args:
            required: raise after an update that failed half-way, where else the host keeps its
                values.

        Returns:
            Whether any was copied.

        Raises:
            UpdateError: the device's values are not those of a complete step.
        """
        names, exchange = self.newer_on_device, self._exchange
        if not names or exchange is None or not (required or exchange.has_weights()):
            return False
        exchange.read_weights(names)
        self.newer_on_device = _NONE
        return True

    def sync_device(self) -> None:
        """Copy to the device the variables that are newer on the host."""
        if (names := self.newer_on_host) and self._exchange is not None:
            self._exchange.write_weights(names)
            self.newer_on_host = _NONE

    def fetch(self) -> bool:
        """Take the lock, and copy the variables that are newer on the device to the host."""
        owner = self.owner  # is not freed meanwhile
        return owner is not None and self.lock.run(self.sync_host)

    def refresh(self) -> None:
        """Fetch before a read of the host's values.

        The caller that has the lock reads them as they are. So does a thread in a `NoSync` block.
        """
        if not self.newer_on_device or self.lock.held_here() or self in getattr(_here, "left", ()):
            return
        self.fetch()


class NoSync:
    """A block in which this thread reads the host's values without a copy from the device.

    A compilation runs in it. It has copied them before, and copies them again later. Meanwhile it
    holds locks that come after those of the views.
    """

    def __init__(self, views: Collection[DualView]) -> None:
        self._views = frozenset(views)

    def __enter__(self) -> None:
        self._before: frozenset[DualView] = getattr(_here, "left", frozenset())
        _here.left = self._before | self._views

    def __exit__(self, *error: object) -> None:
        _here.left = self._before


_here = threading.local()
