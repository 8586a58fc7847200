"""Receive, in a worker process, the messages of its reader while data are being made.

A thread listens, so that a process whose item takes long still ends in time. Python's signals and
PyTorch's loaders belong to the main thread, which makes the data.
"""

import os
import threading
import time
from collections import deque
from multiprocessing.connection import Connection, wait

from ipu_dynamo.batches.loader_workers import LoaderWorkers
from ipu_dynamo.batches.process_exit import parent_exit_descriptor
from ipu_dynamo.batches.worker_messages import (
    BeginEpoch,
    FromWorker,
    SlotFreed,
    StopWorker,
    ToWorker,
    WorkerFailed,
)

POLL = 0.5  # seconds between two looks at the workers of a loader
GRACE = 2.5  # seconds from the request to stop until the process ends itself


class Listener:
    """The messages of the reader so far: the wanted epoch, the free slots, the request to stop.

    Invariant: each slot is either at the reader, or in `_free`, or acquired.

    Args:
        connection: to the reader; only this object uses it.
        slots: of the ring, all empty.
        workers: of a loader, which are added when they start.
    """

    def __init__(self, connection: Connection, slots: int, workers: LoaderWorkers) -> None:
        self._connection, self._workers = connection, workers
        self._sending = threading.Lock()
        self._parent = parent_exit_descriptor()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._free = deque((slot, slot) for slot in range(slots))
        self._wanted = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def stopped(self) -> bool:
        """Whether the process must end."""
        return self._stopped.is_set()

    def superseded(self, epoch: int) -> bool:
        """Whether the reader wants no more items of an epoch."""
        return self._wanted > epoch or self._stopped.is_set()

    def wait_for_begin(self, epoch: int) -> None:
        """Wait until the reader wants this epoch or a later one, or the process must end."""
        with self._changed:
            self._changed.wait_for(lambda: self.superseded(epoch - 1))

    def wait_for_stop(self) -> None:
        self._stopped.wait()

    def acquire_slot(self, epoch: int, backoff: float) -> tuple[int, int] | None:
        """An empty slot and its block; None if the reader wants no more of this epoch.

        Args:
            backoff: seconds that the process sleeps if no slot is empty, before it waits for one.
        """
        if not self._free:
            self._stopped.wait(backoff)
        with self._changed:
            self._changed.wait_for(lambda: self._free or self.superseded(epoch))
            return None if self.superseded(epoch) else self._free.popleft()

    def return_slot(self, slot: int, block: int) -> None:
        """Give back a slot that was acquired and not filled."""
        with self._changed:
            self._free.appendleft((slot, block))

    def send(self, message: FromWorker) -> None:
        with self._sending:
            self._connection.send(message)

    def _listen(self) -> None:
        while (message := self._next()) is not None and not isinstance(message, StopWorker):
            with self._changed:
                if isinstance(message, SlotFreed):
                    self._free.append((message.slot, message.block))
                elif isinstance(message, BeginEpoch):
                    self._wanted = message.epoch
                self._changed.notify_all()
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
        time.sleep(GRACE)  # for loader workers to be stopped in order
        self._workers.remove_leftovers()
        os._exit(1)

    def _next(self) -> ToWorker | None:
        """The next message of the reader; None if the reader has ended."""
        parent = [] if self._parent is None else [self._parent]
        try:
            while self._connection not in (ready := wait([self._connection, *parent], POLL)):
                if ready:
                    return None
                if (reason := self._workers.failure()) is not None:
                    self.send(WorkerFailed(reason))
            message: ToWorker = self._connection.recv()
        except (EOFError, OSError):
            return None
        return message
