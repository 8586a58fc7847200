"""Make the items of an accessor in a process of their own."""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import parent_process, reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
import torch.multiprocessing
from torch import Tensor
from torch.utils.data import DataLoader

from poptorch.arg_parsers import ICustomArgParser, registerCustomArgParser
from poptorch.data.control import Control
from poptorch.data.loader_workers import LoaderWorkers
from poptorch.data.messages import End, Failed, FromWorker, Item, Ready
from poptorch.data.rebatching import pieces
from poptorch.data.ring import Layout, Ring
from poptorch.data.shipping import Shipment
from poptorch.data.skeleton import taken_apart
from poptorch.data.torch_private import without_workers
from poptorch.data.watching import EndsWithParent


@dataclass(frozen=True, slots=True)
class Settings:
    """How items are made.

    Args:
        slots: of the ring.
        rest: seconds to rest when the ring is full.
        load_indefinitely: begin the next epoch when one ends.
        early_preload: begin the first epoch before it is wanted.
        size: rows of an item; None leaves batches as they are.
        keep_rest: whether the last item of an epoch may have fewer rows.
        seed: of this process's random numbers.
        dtype: the default one.
        start_method: of processes that the data set or loader starts itself.
        sharing: PyTorch's way to share tensors between processes.
        parsers: what the accessor's process knows to take apart.
    """

    slots: int
    rest: float
    load_indefinitely: bool
    early_preload: bool
    size: int | None
    keep_rest: bool
    seed: int
    dtype: torch.dtype
    start_method: str
    sharing: str
    parsers: dict[type, ICustomArgParser]


def fetch(connection: Connection, settings: Settings, shipment: Shipment, other_end: Any) -> None:
    """Make items until told to stop, or until the process that wants them is gone.

    Args:
        shipment: of what is iterated for each epoch.
        other_end: of the connection, where this process has inherited it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the accessor's process is told too, and decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if other_end is not None:
        other_end.close()
    torch.set_num_threads(1)  # as PyTorch's loader workers do: the other cores compute
    torch.set_default_dtype(settings.dtype)
    torch.multiprocessing.set_start_method(settings.start_method, force=True)
    torch.multiprocessing.set_sharing_strategy(settings.sharing)
    for data_type, parser in settings.parsers.items():
        registerCustomArgParser(data_type, parser)
    workers = LoaderWorkers()
    control = Control(connection, settings.slots, workers)
    _make_all(connection, control, settings, shipment, workers)
    # the last reference to a loader is gone, with which it has ended its workers in order
    workers.remove_leftovers()
    control.wait_for_stop()


def _make_all(
    connection: Connection,
    control: Control,
    settings: Settings,
    shipment: Shipment,
    workers: LoaderWorkers,
) -> None:
    """Make items; tell why when that fails."""
    try:
        _Fetcher(connection, control, settings, shipment.unpack(), workers).run()
    except _NobodyListensError:
        pass
    except BaseException as error:
        cause = _cause(error)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where PyTorch raises for its workers
        workers.remove_leftovers()
        _tell(control, cause)
        _forget(cause)


class _Fetcher:
    """Fills the ring, epoch after epoch.

    Invariant: epochs are begun in order and none is left out, so what one draws at random does not
    depend on when its items were asked for.
    """

    def __init__(
        self,
        connection: Connection,
        control: Control,
        settings: Settings,
        data: Any,
        workers: LoaderWorkers,
    ) -> None:
        self._connection, self._control, self._settings = connection, control, settings
        self._data, self._workers = data, workers
        if isinstance(data, DataLoader) and data.num_workers:
            self._data = without_workers(data)  # the only reference to those that it starts
            self._data.worker_init_fn = EndsWithParent(data.worker_init_fn)
        self._ring: Ring | None = None
        self._skeleton: bytes | None = None
        self._published = 0

    def run(self) -> None:
        epoch = 1
        while not self._control.stopped():
            before = self._published
            self._seed(epoch)
            self._make(epoch)
            if self._ring is None and not self._control.left_behind(1):
                raise EmptyDataError("the data set is empty, or smaller than one item")
            self._send(End(epoch))
            epoch += 1
            if not self._settings.load_indefinitely or self._published == before:
                self._control.wait_for_begin(epoch)

    def _seed(self, epoch: int) -> None:
        seed = self._settings.seed + epoch
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)

    def _make(self, epoch: int) -> None:
        """Publish the items of an epoch, as long as somebody wants them."""
        taken: tuple[int, int] | None = None
        rows: tuple[int, ...] = ()
        skeleton = b""
        for piece in pieces(self._batches(), self._settings.size):
            tensors = piece.tensors
            if self._ring is None:
                self._ring = self._create_ring(tensors)
            self._ring.check(tensors, fewer_rows=self._fewer_rows)
            if taken is None:
                taken = self._control.take_slot(epoch, self._settings.rest)
                skeleton = taken_apart(piece.batch, piece.leaves)
            if taken is None or self._control.left_behind(epoch):
                break
            slot, _ = taken
            self._ring.move(*taken)
            self._ring.write(slot, tensors, piece.start)
            rows = tuple(piece.start + (len(t) if t.dim() else 1) for t in tensors)
            if piece.completes:
                self._publish(epoch, slot, rows, skeleton)
                taken = None
        if taken is not None and self._settings.keep_rest and not self._control.left_behind(epoch):
            self._publish(epoch, slot, rows, skeleton)
        elif taken is not None:
            self._control.give_back(*taken)

    def _batches(self) -> Iterator[Any]:
        """What an epoch consists of, in order.

        A map-style data set is read up to its length: it may not say where it ends otherwise.
        """
        data = self._data
        if not hasattr(data, "__iter__"):
            return (data[index] for index in range(len(data)))
        before = set(multiprocessing.active_children())
        batches = iter(data)
        if isinstance(data, DataLoader):
            self._workers.add(set(multiprocessing.active_children()) - before)
        return batches

    @property
    def _fewer_rows(self) -> bool:
        """Whether what goes into a slot may be smaller than it."""
        return self._settings.size is not None or self._settings.keep_rest

    def _create_ring(self, tensors: list[Tensor]) -> Ring:
        settings = self._settings
        layout = Layout.of(tensors, slots=settings.slots, rows=settings.size)
        ring, file = Ring.create(layout)
        self._send(Ready(layout))
        parent = parent_process()
        reduction.send_handle(self._connection, file, parent.pid if parent else None)
        os.close(file)
        return ring

    def _publish(self, epoch: int, slot: int, rows: tuple[int, ...], skeleton: bytes) -> None:
        assert self._ring is not None, "a slot is of a ring"
        self._ring.mark(slot, full=True)
        self._send(
            Item(
                epoch,
                slot,
                None if rows == self._ring.layout.rows else rows,
                None if skeleton == self._skeleton else skeleton,
            )
        )
        self._skeleton = skeleton
        self._published += 1
        if self._published == 1 and not self._settings.early_preload:
            self._control.wait_for_begin(1)

    def _send(self, message: FromWorker) -> None:
        try:
            self._control.send(message)
        except OSError as error:
            raise _NobodyListensError from error


class EmptyDataError(Exception):
    """There is nothing to make an item of."""


class _NobodyListensError(Exception):
    """The accessor's process has gone."""


def _cause(error: BaseException) -> BaseException:
    """What has led to an error.

    When a worker of a loader is killed, the connection to it may break before PyTorch is told by
    the system which one it was, and says so wherever the process is then.
    """
    if isinstance(error, OSError | EOFError):
        try:
            time.sleep(0.5)
        except RuntimeError as later:
            return later
    return error


def _forget(error: BaseException | None) -> None:
    """Let go of what an error refers to.

    It may refer to itself and to a loader. Collected as garbage, that would lose the connection to
    its workers before it can end them.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _tell(control: Control, error: BaseException) -> None:
    """Print where an error came from, and say to the accessor that it is the end."""
    if not isinstance(error, KeyboardInterrupt):
        print(f"AsynchronousDataAccessor worker process {os.getpid()} failed:", file=sys.stderr)
        traceback.print_exception(error)
        sys.stderr.flush()
    reason = traceback.format_exception_only(error)[-1].strip()
    with contextlib.suppress(OSError):
        control.send(Failed(reason))
