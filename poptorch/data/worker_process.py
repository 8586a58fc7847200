"""Start the process that makes items, hear from it, and be sure that it ends."""

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

from poptorch._logging import logger
from poptorch.data.fetching import Settings, fetch
from poptorch.data.messages import End, Failed, FromWorker, Item, Ready, Stop, ToWorker
from poptorch.data.ring import Ring
from poptorch.data.shipping import Shipment
from poptorch.data.watching import death_of
from poptorch.enums import SharingStrategy

GRACE = 4.0  # seconds for the process to end by itself
START_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}


class WorkerDied(Exception):
    """There will be no more items; the text says why and from which process."""


class WorkerProcess:
    """The process, seen from the one that takes its items.

    Invariant: after `stop` there is no such process.

    Args:
        data: what it iterates.
        settings: how it makes items of it.
        strategy: how it is started and gets `data`.
    """

    def __init__(self, data: Any, settings: Settings, strategy: SharingStrategy) -> None:
        self._owner, self._stopped = os.getpid(), False
        self._data_buffers: Ring | None = None  # PopTorch's name, by which programs look at it
        self._failure: str | None = None
        shipment = Shipment(data, by_disk=strategy is SharingStrategy.FileSystem)
        if strategy is SharingStrategy.ForkServer:
            _preload()
        context: Any = torch.multiprocessing.get_context(START_METHODS[strategy])
        self._connection, other_end = context.Pipe()
        inherited = self._connection if strategy is SharingStrategy.Fork else None
        self._process: BaseProcess = context.Process(
            target=fetch,
            args=(other_end, settings, shipment, inherited),
            name="AsynchronousDataAccessor",
        )
        with other_end:
            self._process.start()
        self._death = death_of(self._process)
        logger.debug("AsynchronousDataAccessor worker process: %d", self._process.pid)

    @property
    def ring(self) -> Ring:
        assert self._data_buffers is not None, "an item was received"
        return self._data_buffers

    def send(self, message: ToWorker) -> None:
        """Say something; when the process has ended, the next `receive` tells."""
        with suppress(OSError):
            self._connection.send(message)

    def receive(self) -> Item | End:
        """What the process says next about items.

        Raises:
            WorkerDied: it failed or was ended.
        """
        while self._failure is None:
            if self._death in wait([self._connection, self._death]):
                self._failure = self._last_words() or self._how_it_ended()
                break
            try:
                message = self._next()
            except (EOFError, OSError, pickle.UnpicklingError):
                self._failure = self._how_it_ended()
                break
            except BaseException:
                self._failure = "an interrupt came while an item was received: make a new loader"
                raise
            if not isinstance(message, Failed):
                return message
            self._failure = f"{message.reason} (in process {self._process.pid})"
        raise WorkerDied(self._failure)

    def stop(self) -> None:
        """End the process, by force if it does not end by itself in time."""
        if self._stopped or os.getpid() != self._owner:
            return
        self._stopped = True
        self._failure = f"process {self._process.pid} was stopped"
        self.send(Stop())
        try:
            wait([self._death], GRACE)
        finally:  # also when interrupted
            if not wait([self._death], 0):
                self._process.kill()
                wait([self._death], 1.0)
            self._process.exitcode  # noqa: B018 - asking reaps it
            self._connection.close()
            if self._death != self._process.sentinel:
                os.close(self._death)

    def _next(self) -> Item | End | Failed:
        message: FromWorker = self._connection.recv()
        while isinstance(message, Ready):
            file = reduction.recv_handle(self._connection)
            self._data_buffers = Ring(message.layout, file)
            os.close(file)
            message = self._connection.recv()
        return message

    def _last_words(self) -> str | None:
        """Why the process failed, if it had the time to say so."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while self._connection.poll():
                if isinstance(message := self._next(), Failed):
                    return f"{message.reason} (in process {self._process.pid})"
        return None

    def _how_it_ended(self) -> str:
        end = time.monotonic() + 1.0
        while (code := self._process.exitcode) is None and time.monotonic() < end:
            time.sleep(0.01)  # its files are closed before the system knows how it has ended
        if code is None:
            return f"process {self._process.pid} closed its connection"
        if code >= 0:
            return f"process {self._process.pid} ended with exit code {code}"
        return f"process {self._process.pid} was killed by {signal.Signals(-code).name}"


def _preload() -> None:
    """Let the server that new processes are copies of import PyTorch once, and not each of them.

    Only where the program has not chosen itself what the server imports.
    """
    server = multiprocessing.forkserver._forkserver
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        multiprocessing.set_forkserver_preload(["__main__", fetch.__module__])
