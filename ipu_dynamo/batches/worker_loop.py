"""Make items in a worker process, until the reader stops it or ends."""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import parent_process, reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
import torch.multiprocessing
from torch import Tensor
from torch.utils.data import DataLoader

from ipu_dynamo.batches.listener import Listener
from ipu_dynamo.batches.loader_workers import LoaderWorkers, without_workers
from ipu_dynamo.batches.pickling import DatasetTransfer, strip_tensors
from ipu_dynamo.batches.process_exit import ExitWithParent
from ipu_dynamo.batches.rebatching import batch_slices
from ipu_dynamo.batches.ring import Ring, RingLayout
from ipu_dynamo.batches.worker_messages import (
    EpochEnded,
    FromWorker,
    ItemReady,
    RingCreated,
    WorkerFailed,
)
from ipu_dynamo.errors import BatchError


def _drawn_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())


def _start_method() -> str:
    """The start method of this process, without settling it."""
    methods = torch.multiprocessing.get_all_start_methods()  # the default one is the first
    return torch.multiprocessing.get_start_method(allow_none=True) or methods[0]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker process makes items.

    Args:
        tensors_of: lists the tensors of a batch, and raises for other leaves.
        init: is called in the process before it gets its data set.
        slots: of the ring.
        backoff: seconds that the process sleeps when the ring is full.
        load_indefinitely: begin the next epoch when one ends.
        early_preload: begin the first epoch before the reader wants it.
        size: rows of an item; None leaves batches as they are.
        keep_last: whether the last item of an epoch may have fewer rows.
        seed: of the process's random numbers; drawn from PyTorch's generator of this process.
        dtype: the default one.
        start_method: of processes that the data set or loader starts itself.
        sharing: PyTorch's way to share tensors between processes.
    """

    tensors_of: Callable[[Any], Iterable[Tensor]]
    init: Callable[[], object]
    slots: int = 3
    backoff: float = 0.0
    load_indefinitely: bool = True
    early_preload: bool = False
    size: int | None = None
    keep_last: bool = False
    seed: int = field(default_factory=_drawn_seed)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    start_method: str = field(default_factory=_start_method)
    sharing: str = field(default_factory=torch.multiprocessing.get_sharing_strategy)


def run_worker(
    connection: Connection, settings: WorkerSettings, transfer: DatasetTransfer, other_end: Any
) -> None:
    """Make items until the reader stops this process, or ends itself.

    Args:
        transfer: of the data that is iterated in each epoch.
        other_end: of the connection, where this process has inherited it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reader's process gets it too, and decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if other_end is not None:
        other_end.close()
    torch.set_num_threads(1)  # as PyTorch's loader workers do: the other cores compute
    torch.set_default_dtype(settings.dtype)
    torch.multiprocessing.set_start_method(settings.start_method, force=True)
    torch.multiprocessing.set_sharing_strategy(settings.sharing)
    settings.init()
    workers = LoaderWorkers()
    listener = Listener(connection, settings.slots, workers)
    _make_items(connection, listener, settings, transfer, workers)
    # the last reference to a loader is gone, with which it has ended its workers in order
    workers.remove_leftovers()
    listener.wait_for_stop()


def _make_items(
    connection: Connection,
    listener: Listener,
    settings: WorkerSettings,
    transfer: DatasetTransfer,
    workers: LoaderWorkers,
) -> None:
    """Make items, and report why that fails."""
    try:
        _Fetcher(connection, listener, settings, transfer.unpack(), workers).run()
    except _NobodyListensError:
        pass
    except BaseException as error:
        cause = _cause(error)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where PyTorch raises for its workers
        workers.remove_leftovers()
        _report(listener, cause)
        _clear_frames(cause)


class _Fetcher:
    """Fills the ring, epoch after epoch.

    Invariant: epochs are begun in order and none is left out, so the random numbers of an epoch do
    not depend on when its items are read.
    """

    def __init__(
        self,
        connection: Connection,
        listener: Listener,
        settings: WorkerSettings,
        data: Any,
        workers: LoaderWorkers,
    ) -> None:
        self._connection, self._listener, self._settings = connection, listener, settings
        self._data, self._workers = data, workers
        if isinstance(data, DataLoader) and data.num_workers:
            self._data = without_workers(data)  # the only reference to the workers that it starts
            self._data.worker_init_fn = ExitWithParent(data.worker_init_fn)
        self._ring: Ring | None = None
        self._skeleton: bytes | None = None
        self._published = 0

    def run(self) -> None:
        epoch = 1
        while not self._listener.stopped():
            before = self._published
            self._seed(epoch)
            self._make_epoch(epoch)
            if self._ring is None and not self._listener.superseded(1):
                raise BatchError("the data set is empty, or smaller than one item")
            self._send(EpochEnded(epoch))
            epoch += 1
            if not self._settings.load_indefinitely or self._published == before:
                self._listener.wait_for_begin(epoch)

    def _seed(self, epoch: int) -> None:
        seed = self._settings.seed + epoch
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)

    def _make_epoch(self, epoch: int) -> None:
        """Publish the items of an epoch, until the reader wants no more of them."""
        settings, listener = self._settings, self._listener
        acquired: tuple[int, int] | None = None
        rows: tuple[int, ...] = ()
        skeleton = b""
        for part in batch_slices(self._batches(), settings.size, settings.tensors_of):
            tensors = part.tensors
            if self._ring is None:
                self._ring = self._create_ring(tensors)
            self._ring.check(tensors, fewer_rows=self._fewer_rows)
            if acquired is None:
                acquired = listener.acquire_slot(epoch, settings.backoff)
                skeleton = strip_tensors(part.batch, part.leaves)
            if acquired is None or listener.superseded(epoch):
                break
            slot, _ = acquired
            self._ring.remap(*acquired)
            self._ring.write(slot, tensors, part.start)
            rows = tuple(part.start + (len(t) if t.dim() else 1) for t in tensors)
            if part.completes:
                self._publish(epoch, slot, rows, skeleton)
                acquired = None
        if acquired is not None and settings.keep_last and not listener.superseded(epoch):
            self._publish(epoch, slot, rows, skeleton)
        elif acquired is not None:
            listener.return_slot(*acquired)

    def _batches(self) -> Iterator[Any]:
        """The batches of an epoch, in order.

        A map-style data set is read up to its length, because it may raise no IndexError at its
        end.
        """
        data = self._data
        if not hasattr(data, "__iter__"):
            return (data[index] for index in range(len(data)))
        before = set(multiprocessing.active_children())
        batches: Iterator[Any] = iter(data)
        if isinstance(data, DataLoader):
            self._workers.add(set(multiprocessing.active_children()) - before)
        return batches

    @property
    def _fewer_rows(self) -> bool:
        """Whether the tensors of a slot may be smaller than it."""
        return self._settings.size is not None or self._settings.keep_last

    def _create_ring(self, tensors: list[Tensor]) -> Ring:
        settings = self._settings
        layout = RingLayout.of(tensors, slots=settings.slots, rows=settings.size)
        ring, file = Ring.create(layout)
        self._send(RingCreated(layout))
        parent = parent_process()
        reduction.send_handle(self._connection, file, parent.pid if parent else None)
        os.close(file)
        return ring

    def _publish(self, epoch: int, slot: int, rows: tuple[int, ...], skeleton: bytes) -> None:
        assert self._ring is not None, "a slot is of a ring"
        self._ring.flag(slot, full=True)
        self._send(
            ItemReady(
                epoch,
                slot,
                None if rows == self._ring.layout.rows else rows,
                None if skeleton == self._skeleton else skeleton,
            )
        )
        self._skeleton = skeleton
        self._published += 1
        if self._published == 1 and not self._settings.early_preload:
            self._listener.wait_for_begin(1)

    def _send(self, message: FromWorker) -> None:
        try:
            self._listener.send(message)
        except OSError as error:
            raise _NobodyListensError from error


class _NobodyListensError(Exception):
    """The reader's process has ended."""


def _cause(error: BaseException) -> BaseException:
    """The cause of an error.

    When a worker of a loader is killed, the connection to it may break before the system reports
    its end to PyTorch. PyTorch then raises in the line that the process executes at that moment.
    """
    if isinstance(error, OSError | EOFError):
        try:
            time.sleep(0.5)
        except RuntimeError as later:
            return later
    return error


def _clear_frames(error: BaseException | None) -> None:
    """Drop the references of an error's frames.

    They may hold the error itself and a loader. The garbage collector would close the loader's
    connection to its workers before it can end them.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _report(listener: Listener, error: BaseException) -> None:
    """Print an error with its traceback, and send its text to the reader as the end."""
    if not isinstance(error, KeyboardInterrupt):
        name = multiprocessing.current_process().name
        print(f"{name} worker process {os.getpid()} failed:", file=sys.stderr)
        traceback.print_exception(error)
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        listener.send(WorkerFailed(_reason(error)))


def _reason(error: BaseException) -> str:
    """The text of an error, with its class unless the error is ours, and without its notes."""
    if isinstance(error, BatchError):
        return str(error)
    text = traceback.TracebackException.from_exception(error)
    text.__notes__ = None
    return list(text.format_exception_only())[-1].strip()
