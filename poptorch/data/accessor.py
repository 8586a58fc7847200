"""Make the items of a data set in another process, while this one computes."""

import pickle
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.multiprocessing

from poptorch.arg_parsers import picklable_parsers
from poptorch.data.fetching import Settings
from poptorch.data.messages import Begin, End, Free, Item
from poptorch.data.skeleton import put_together
from poptorch.data.source import source_of
from poptorch.data.worker_process import WorkerDied, WorkerProcess
from poptorch.enums import SharingStrategy
from poptorch.errors import createPoptorchError, require

_FAILED_TO_START = (
    "AsynchronousDataAccessor worker thread failed to start (Check above for details)"
)
_FAILED_LATER = "An error occurred in the data fetcher"


class AsynchronousDataAccessor:
    """Items of a data set or loader, made ahead by a process of their own.

    An item's tensors are in memory that both processes share, and are not copied. Items that the
    program keeps do not change: the process puts other items elsewhere, and this memory grows with
    the kept items. All items have the structure, shapes and dtypes of the first.
    Each `iter()` begins an epoch, and leaves out what is left of the last one.

    What the data set draws at random comes from generators that are seeded from PyTorch's of this
    process, for each epoch anew: `torch.manual_seed` decides it, whatever the strategy.

    Args:
        dataset: a data set, map-style or iterable, or a loader of this package or of torch.
        buffer_size: how many items are kept ready.
        miss_sleep_time_in_ms: how long the process rests when so many are.
        load_indefinitely: begin the next epoch as soon as one ends, or when it is asked for.
        early_preload: fill the buffer from now on, or from the first epoch on.
        sharing_strategy: how the process is started and gets the data set. SharedMemory: a new
            interpreter; tensors of the data set move to shared memory. FileSystem: the same, but
            they come in a file. Fork: a copy of this process. ForkServer: a copy of a process
            that has imported no more than this package. All but Fork pickle the data set.
        rebatched_size: cut the batches into items of so many samples. A data set or a loader of
            torch must then give one sample at a time, with a leading dimension of 1.

    Raises:
        poptorch.Error: the process cannot be started, or makes no first item.
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        strategy = strategy_of(sharing_strategy)
        _check(buffer_size, miss_sleep_time_in_ms, rebatched_size)
        self._source = source_of(dataset, rebatched_size)
        settings = Settings(
            slots=buffer_size,
            rest=miss_sleep_time_in_ms / 1000,
            load_indefinitely=bool(load_indefinitely),
            early_preload=bool(early_preload),
            size=rebatched_size,
            keep_rest=self._source.keep_rest,
            seed=int(torch.empty((), dtype=torch.int64).random_().item()),
            dtype=torch.get_default_dtype(),
            start_method=_start_method(),
            sharing=torch.multiprocessing.get_sharing_strategy(),
            parsers=picklable_parsers(),
        )
        self._epoch = 0
        self._held: Item | None = None
        self._skeleton = b""
        try:
            self._worker = WorkerProcess(self._source.data, settings, strategy)
        except Exception as error:
            raise createPoptorchError(
                f"{_FAILED_TO_START}: {_why_not_sent(error)}", id="loader"
            ) from error
        self._finalizer = Finalize(self, self._worker.stop, exitpriority=10)
        try:
            self._first: Item | End | None = self._worker.receive()
        except BaseException as error:
            self._finalizer()
            if isinstance(error, WorkerDied):
                raise createPoptorchError(f"{_FAILED_TO_START}: {error}", id="loader") from None
            raise

    def __len__(self) -> int:
        return self._source.length()

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; the iterator of an earlier one gives no more items."""
        self._epoch += 1
        self._worker.send(Begin(self._epoch))
        return _Epoch(self, self._epoch)

    def terminate(self) -> None:
        """End the process; no more items come. Deleting the accessor and exiting do it too."""
        self._finalizer()
        self._first = None

    def _next(self, epoch: int) -> Any:
        """Let go of the item that was handed out last, and hand out the next one of an epoch."""
        if epoch != self._epoch:
            raise createPoptorchError(
                "another iteration of this loader has begun, which ended this one: make a second "
                "loader to read a data set twice at a time",
                id="loader",
            )
        if self._held is not None:
            self._let_go(self._held)
        try:
            message = self._receive()
            while message.epoch < epoch:
                if isinstance(message, Item):
                    self._let_go(message)
                message = self._receive()
        except WorkerDied as error:
            raise AssertionError(f"{_FAILED_LATER}: {error}") from None
        if isinstance(message, End):
            raise StopIteration
        self._held = message
        return put_together(self._skeleton, self._worker.ring.read(message.slot, message.rows))

    def _receive(self) -> Item | End:
        message = self._first or self._worker.receive()
        self._first = None
        if isinstance(message, Item) and message.skeleton is not None:
            self._skeleton = message.skeleton
        return message

    def _let_go(self, item: Item) -> None:
        self._held = None
        self._worker.ring.mark(item.slot, full=False)
        self._worker.send(Free(item.slot, self._worker.ring.vacate(item.slot)))


class _Epoch(Iterator[Any]):
    """The items of one epoch."""

    def __init__(self, accessor: AsynchronousDataAccessor, number: int) -> None:
        self._accessor: AsynchronousDataAccessor | None = accessor
        self._number = number

    def __next__(self) -> Any:
        if self._accessor is None:
            raise StopIteration
        try:
            return self._accessor._next(self._number)
        except StopIteration:
            self._accessor = None
            raise


def _why_not_sent(error: Exception) -> str:
    """Why a process could not be started, and what to try."""
    if not isinstance(error, pickle.PicklingError | AttributeError | TypeError):
        return str(error).strip()
    return (
        f"the data set cannot be sent to another process: {error}. Define what it is made of at "
        "the top level of a module, or use SharingStrategy.Fork"
    )


def _start_method() -> str:
    """How this process starts others unless told otherwise, without settling it."""
    methods = torch.multiprocessing.get_all_start_methods()  # the default one is the first
    return torch.multiprocessing.get_start_method(allow_none=True) or methods[0]


def _check(
    buffer_size: int,
    miss_sleep_time_in_ms: float,
    rebatched_size: int | None,
) -> None:
    require(
        isinstance(buffer_size, int) and buffer_size >= 1,
        f"buffer_size must be an integer of at least 1, got {buffer_size!r}",
    )
    require(
        miss_sleep_time_in_ms >= 0,
        f"miss_sleep_time_in_ms must not be negative, got {miss_sleep_time_in_ms}",
    )
    require(
        rebatched_size is None or (isinstance(rebatched_size, int) and rebatched_size > 1),
        f"rebatched_size must be an integer larger than 1, got {rebatched_size!r}",
    )


def strategy_of(given: Any) -> SharingStrategy:
    """The strategy that a value stands for: a member, its number, or its name, as files have it."""
    members = SharingStrategy.__members__
    known = given in members if isinstance(given, str) else given in list(SharingStrategy)
    require(
        known,
        f"sharing_strategy must be a poptorch.SharingStrategy or the name of one, got {given!r}: "
        f"there are {', '.join(members)}",
    )
    return members[given] if isinstance(given, str) else SharingStrategy(given)
