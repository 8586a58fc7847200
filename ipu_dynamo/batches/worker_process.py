"""Start the process that makes items, read its items, and make sure that it ends."""

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import time
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing

from ipu_dynamo.batches.pickling import DatasetTransfer, insert_tensors
from ipu_dynamo.batches.process_exit import exit_descriptor
from ipu_dynamo.batches.ring import Ring
from ipu_dynamo.batches.worker_loop import WorkerSettings, run_worker
from ipu_dynamo.batches.worker_messages import (
    BeginEpoch,
    EpochEnded,
    FromWorker,
    ItemReady,
    RingCreated,
    SlotFreed,
    StopWorker,
    ToWorker,
    WorkerFailed,
)
from ipu_dynamo.errors import BatchError

GRACE = 4.0  # seconds for the process to end by itself


class WorkerDied(BatchError):
    """No more items follow; the text says why and names the process."""


class WorkerProcess:
    """A process that makes items of a data set, seen by the reader of the items.

    Each `begin` starts an epoch and skips the rest of the epoch before. `next` returns its items:

        worker = WorkerProcess(data, settings, name="loader")
        epoch = worker.begin()
        item = worker.next(epoch)  # raises StopIteration at the end of the epoch
        worker.stop()

    Invariant: after `stop` the process has ended.

    Args:
        data: is iterated in each epoch.
        settings: of the process.
        name: of the process.
        start_method: of `multiprocessing`. All but "fork" pickle `data`.
        by_disk: whether pickled data goes through a file on the disk, and not in memory.
        preload: the module that the server of "forkserver" imports in advance.
    """

    def __init__(
        self,
        data: Any,
        settings: WorkerSettings,
        *,
        name: str,
        start_method: str = "forkserver",
        by_disk: bool = False,
        preload: str = run_worker.__module__,
    ) -> None:
        self._owner, self._stopped = os.getpid(), False
        self._ring: Ring | None = None
        self._failure: str | None = None
        self._epoch = 0
        self._pending: ItemReady | EpochEnded | None = None  # received, and not read yet
        self._held: ItemReady | None = None  # the item that was returned last
        self._skeleton = b""
        transfer = DatasetTransfer(data, by_disk=by_disk)
        if start_method == "forkserver":
            _preload(preload)
        context: Any = torch.multiprocessing.get_context(start_method)
        self._connection, other_end = context.Pipe()
        inherited = self._connection if start_method == "fork" else None
        self._process: BaseProcess = context.Process(
            target=run_worker, args=(other_end, settings, transfer, inherited), name=name
        )
        with other_end:
            self._process.start()
        self._exit = exit_descriptor(self._process)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def ring(self) -> Ring | None:
        """The ring of items; None before the first one."""
        return self._ring

    def wait_for_first(self) -> None:
        """Wait until the first item or the end of the first epoch is there.

        Raises:
            WorkerDied: the process failed or was ended.
        """
        self._pending = self._receive()

    def begin(self) -> int:
        """Begin an epoch, which ends all earlier ones, and return its number."""
        self._epoch += 1
        self._send(BeginEpoch(self._epoch))
        return self._epoch

    def next(self, epoch: int) -> Any:
        """Free the slot of the item before, and return the next item of an epoch.

        Raises:
            StopIteration: the epoch has no more items.
            BatchError: a later epoch has begun.
            WorkerDied: the process failed or was ended.
        """
        if epoch != self._epoch:
            raise BatchError(
                "another iteration of this loader has begun, which ended this one: make a second "
                "loader to read a data set twice at a time"
            )
        if self._held is not None:
            self._free(self._held)
        while (message := self._take()).epoch < epoch:
            if isinstance(message, ItemReady):
                self._free(message)
        if isinstance(message, EpochEnded):
            raise StopIteration
        self._held = message
        return insert_tensors(self._skeleton, self._known_ring().read(message.slot, message.rows))

    def stop(self) -> None:
        """End the process, by force if it does not end by itself in time."""
        if self._stopped or os.getpid() != self._owner:
            return
        self._stopped = True
        self._pending = None
        self._failure = f"process {self._process.pid} was stopped"
        self._send(StopWorker())
        try:
            wait([self._exit], GRACE)
        finally:  # also when interrupted
            if not wait([self._exit], 0):
                self._process.kill()
                wait([self._exit], 1.0)
            self._process.exitcode  # noqa: B018 - reading it reaps the process
            self._connection.close()
            if self._exit != self._process.sentinel:
                os.close(self._exit)

    def _take(self) -> ItemReady | EpochEnded:
        message = self._pending or self._receive()
        self._pending = None
        if isinstance(message, ItemReady) and message.skeleton is not None:
            self._skeleton = message.skeleton
        return message

    def _free(self, item: ItemReady) -> None:
        self._held = None
        ring = self._known_ring()
        ring.flag(item.slot, full=False)
        self._send(SlotFreed(item.slot, ring.free(item.slot)))

    def _known_ring(self) -> Ring:
        assert self._ring is not None, "an item was received"
        return self._ring

    def _send(self, message: ToWorker) -> None:
        """Send a message; if the process has ended, the next `_receive` raises."""
        with suppress(OSError):
            self._connection.send(message)

    def _receive(self) -> ItemReady | EpochEnded:
        """The next message of the process about items."""
        while self._failure is None:
            if self._exit in wait([self._connection, self._exit]):
                self._failure = self._last_words() or self._how_it_ended()
                break
            try:
                message = self._next_message()
            except (EOFError, OSError, pickle.UnpicklingError):
                self._failure = self._how_it_ended()
                break
            except BaseException:
                self._failure = "an interrupt came while an item was received: make a new loader"
                raise
            if not isinstance(message, WorkerFailed):
                return message
            self._failure = f"{message.reason} (in process {self._process.pid})"
        raise WorkerDied(self._failure)

    def _next_message(self) -> ItemReady | EpochEnded | WorkerFailed:
        message: FromWorker = self._connection.recv()
        while isinstance(message, RingCreated):
            file = reduction.recv_handle(self._connection)
            self._ring = Ring(message.layout, file)
            os.close(file)
            message = self._connection.recv()
        return message

    def _last_words(self) -> str | None:
        """Why the process failed, if it had the time to report it."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while self._connection.poll():
                if isinstance(message := self._next_message(), WorkerFailed):
                    return f"{message.reason} (in process {self._process.pid})"
        return None

    def _how_it_ended(self) -> str:
        end = time.monotonic() + 1.0
        while (code := self._process.exitcode) is None and time.monotonic() < end:
            time.sleep(0.01)  # its files are closed before the system knows its exit code
        if code is None:
            return f"process {self._process.pid} closed its connection"
        if code >= 0:
            return f"process {self._process.pid} ended with exit code {code}"
        return f"process {self._process.pid} was killed by {signal.Signals(-code).name}"


def _preload(module: str) -> None:
    """Let the fork server import PyTorch once, and not each of its copies.

    A program's own choice of preloaded modules stays.
    """
    server = multiprocessing.forkserver._forkserver
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        multiprocessing.set_forkserver_preload(["__main__", module])
