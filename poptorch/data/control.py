"""Hear, in a worker process, what its accessor wants while data are being made.

A thread listens, so that a process that makes data for a long time still ends in time. Python's
signals and PyTorch's loaders belong to the main thread, where the data are made.
"""

import os
import threading
import time
from collections import deque
from multiprocessing.connection import Connection, wait

from poptorch.data.loader_workers import LoaderWorkers
from poptorch.data.messages import Begin, Failed, Free, FromWorker, Stop, ToWorker
from poptorch.data.watching import death_of_parent

LOOK = 0.5  # seconds between two looks at the workers of a loader
GRACE = 2.5  # seconds from the wish to stop until the process is ended from inside


class Control:
    """What the accessor has said so far.

    Invariant: a slot is either in the accessor's hands, or in `_free`, or taken.

    Args:
        connection: to the accessor; only this object uses it.
        slots: of the ring, all empty.
        workers: of a loader, which it adds when it starts them.
    """

    def __init__(self, connection: Connection, slots: int, workers: LoaderWorkers) -> None:
        self._connection, self._workers = connection, workers
        self._sending = threading.Lock()
        self._parent = death_of_parent()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._free = deque((slot, slot) for slot in range(slots))
        self._wanted = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def stopped(self, within: float = 0.0) -> bool:
        """Whether the process shall end, or is told so in this many seconds."""
        return self._stopped.wait(within)

    def left_behind(self, epoch: int) -> bool:
        """Whether nobody wants more items of an epoch."""
        return self._wanted > epoch or self._stopped.is_set()

    def wait_for_begin(self, epoch: int) -> None:
        """Wait until the accessor wants this epoch or a later one, or the process shall end."""
        with self._changed:
            self._changed.wait_for(lambda: self.left_behind(epoch - 1))

    def wait_for_stop(self) -> None:
        self._stopped.wait()

    def take_slot(self, epoch: int, rest: float) -> tuple[int, int] | None:
        """An empty slot and its place; None when nobody wants more of this epoch.

        Args:
            rest: seconds that the process rests when there is none, before it looks again.
        """
        if not self._free:
            self._stopped.wait(rest)
        with self._changed:
            self._changed.wait_for(lambda: self._free or self.left_behind(epoch))
            return None if self.left_behind(epoch) else self._free.popleft()

    def give_back(self, slot: int, place: int) -> None:
        """Let a slot that was taken and not filled be taken again."""
        with self._changed:
            self._free.appendleft((slot, place))

    def send(self, message: FromWorker) -> None:
        with self._sending:
            self._connection.send(message)

    def _listen(self) -> None:
        while (message := self._next()) is not None and not isinstance(message, Stop):
            with self._changed:
                if isinstance(message, Free):
                    self._free.append((message.slot, message.place))
                elif isinstance(message, Begin):
                    self._wanted = message.epoch
                self._changed.notify_all()
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
        time.sleep(GRACE)  # for loader workers to be stopped in order
        self._workers.remove_leftovers()
        os._exit(1)

    def _next(self) -> ToWorker | None:
        """What the accessor says next; None when it has ended."""
        parent = [] if self._parent is None else [self._parent]
        try:
            while self._connection not in (ready := wait([self._connection, *parent], LOOK)):
                if ready:
                    return None
                if (reason := self._workers.reason_of_death()) is not None:
                    self.send(Failed(reason))
            message: ToWorker = self._connection.recv()
        except (EOFError, OSError):
            return None
        return message
