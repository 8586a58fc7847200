"""Make the items of a data set in another process, while this one computes."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from ipu_dynamo.batches.loader_workers import without_workers
from ipu_dynamo.batches.worker_loop import WorkerSettings
from ipu_dynamo.batches.worker_process import WorkerDied, WorkerProcess
from poptorch._logging import logger
from poptorch.arg_parsers import (
    ICustomArgParser,
    picklable_parsers,
    registerCustomArgParser,
    tensors_of,
)
from poptorch.enums import SharingStrategy
from poptorch.errors import createPoptorchError, require, wrapped

_NAME = "AsynchronousDataAccessor"
_FAILED_TO_START = f"{_NAME} worker thread failed to start (Check above for details)"
_FAILED_LATER = "An error occurred in the data fetcher"
_START_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}


class AsynchronousDataAccessor:
    """Items of a data set or loader, made ahead by a process of their own.

    An item's tensors are in memory that both processes share, and are not copied. Items that the
    program keeps do not change: the process puts other items elsewhere, and this memory grows with
    the kept items. All items have the structure, shapes and dtypes of the first.
    Each `iter()` begins an epoch, and skips the rest of the epoch before.

    Random numbers of the data set come from generators that are seeded for each epoch, from
    PyTorch's generator of this process: `torch.manual_seed` decides them for each strategy.

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
        self.rebatched_size = rebatched_size
        self._begun = self._ended = 0  # epochs, from 1
        settings = WorkerSettings(
            tensors_of=_tensors_of_item,
            init=partial(_register, picklable_parsers()),
            slots=buffer_size,
            backoff=miss_sleep_time_in_ms / 1000,
            load_indefinitely=bool(load_indefinitely),
            early_preload=bool(early_preload),
            size=rebatched_size,
            keep_last=self._source.keep_last,
        )
        try:
            self._worker = _Worker(
                self._source.data,
                settings,
                name=_NAME,
                start_method=_START_METHODS[strategy],
                by_disk=strategy is SharingStrategy.FileSystem,
                preload=__name__,
            )
        except Exception as error:
            raise createPoptorchError(
                f"{_FAILED_TO_START}: {_why_not_sent(error)}", id="loader"
            ) from error
        logger.debug("%s worker process: %d", _NAME, self._worker.pid)
        self._finalizer = Finalize(self, self._worker.stop, exitpriority=10)
        try:
            self._worker.wait_for_first()
        except BaseException as error:
            self._finalizer()
            if isinstance(error, WorkerDied):
                raise createPoptorchError(f"{_FAILED_TO_START}: {error}", id="loader") from None
            raise

    def __len__(self) -> int:
        return self._source.length()

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; the iterator of an earlier one gives no more items."""
        self._begun = self._worker.begin()
        return _Epoch(self, self._begun)

    def __next__(self) -> Any:
        """The next item of the epoch that was begun last, or of the first one."""
        if not self._begun:
            iter(self)
        if self._begun == self._ended:
            raise StopIteration
        return self._next(self._begun)

    def terminate(self) -> None:
        """End the process; no more items come. Deleting the accessor and exiting do it too."""
        self._finalizer()

    def _next(self, epoch: int) -> Any:
        """Release the item before, and return the next item of an epoch."""
        with wrapped():
            try:
                return self._worker.next(epoch)
            except StopIteration:
                self._ended = epoch
                raise
            except WorkerDied as error:
                raise AssertionError(f"{_FAILED_LATER}: {error}") from None


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


class _Buffers(NamedTuple):
    indices_mem: Tensor  # of each slot of the ring, whether it is full


class _Worker(WorkerProcess):
    """The process, with PopTorch's names by which programs look at its ring."""

    @property
    def _data_buffers(self) -> _Buffers | None:
        return None if self.ring is None else _Buffers(self.ring.full)


@dataclass(frozen=True, slots=True)
class Source:
    """The data of the other process.

    Args:
        data: gives the batches of an epoch each time that it is iterated or read.
        length: how many items they make.
        keep_last: whether the last item may have fewer rows.
    """

    data: Any
    length: Callable[[], int]
    keep_last: bool = False


def source_of(dataset: Any, rebatched_size: int | None) -> Source:
    """The source of a data set or loader of the user."""
    if hasattr(type(dataset), "_source"):  # a loader of this package
        source: Source = dataset._source(rebatched_size)
        return source
    data = dataset
    if isinstance(dataset, DataLoader):
        require(
            rebatched_size is None or dataset.batch_size in (1, None),
            f"rebatched_size needs a loader of batch size 1, got {dataset.batch_size}",
        )
        data = without_workers(dataset)
    if rebatched_size is None:
        return Source(data, lambda: len(dataset))
    return Source(data, lambda: count_items(len(dataset), rebatched_size, keep_last=False))


def count_items(samples: int, size: int, *, keep_last: bool) -> int:
    """How many items of `size` samples are made."""
    whole, rest = divmod(samples, size)
    return whole + (rest > 0 and keep_last)


def _register(parsers: dict[type, ICustomArgParser]) -> None:
    """Register in the other process the parsers of this one."""
    for data_type, parser in parsers.items():
        registerCustomArgParser(data_type, parser)


def _tensors_of_item(item: Any) -> Iterator[Tensor]:
    for leaf in tensors_of(item):
        require(
            isinstance(leaf, Tensor),
            f"items must be made of tensors, got a {type(leaf).__name__}: convert it or leave it "
            "out in collate_fn, a function at the top level of a module (no lambda), or register a "
            "parser of its class with poptorch.registerCustomArgParser",
        )
        yield leaf


def _why_not_sent(error: Exception) -> str:
    """Why a process could not be started, and what to try."""
    if not isinstance(error, pickle.PicklingError | AttributeError | TypeError):
        return str(error).strip()
    return (
        f"the data set cannot be sent to another process: {error}. Define what it is made of at "
        "the top level of a module, or use SharingStrategy.Fork"
    )


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
