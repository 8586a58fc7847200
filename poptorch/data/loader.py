"""Load data in items of as many samples as one call of a model consumes."""

from collections.abc import Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, default_collate

from ipu_dynamo.batches.loader_workers import without_workers
from ipu_dynamo.batches.sampling import Batches, GroupedBatches, ProcessSampler
from poptorch._logging import logger
from poptorch.arg_parsers import rebuilt, tensors_of
from poptorch.data.accessor import AsynchronousDataAccessor, Source, count_items
from poptorch.enums import DataLoaderMode
from poptorch.errors import createPoptorchError, require
from poptorch.options import Options


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A torch data loader whose items feed one call.

    Each item has `combinedBatchSize` samples: the micro-batch size times device iterations, input
    groups and accumulation steps. With several processes, each loads its own part.

    Args:
        options: of the model's compilation; the loader freezes them.
        dataset: map-style or iterable.
        batch_size: samples of one micro-batch; None passes samples through as they are.
        shuffle: draw a new order for every epoch.
        num_workers: processes that load; 0 loads in this one, or in that of `mode`.
        drop_last: leave out an incomplete last item.
        persistent_workers: keep workers between epochs; None keeps them if there are any.
        auto_distributed_partitioning: divide a map-style data set among processes.
        mode: Sync makes items when they are asked for; Async makes them ahead, in a process beside
            this one (see `AsynchronousDataAccessor`); AsyncRebatched does too, and joins what
            workers have left over to whole items.
        async_options: arguments of the accessor by name, but for `rebatched_size`.
        rebatched_worker_size: samples that workers of AsyncRebatched load at a time; None: as many
            as an item has.
        batch_sampler: gives lists of indices; several of its batches make an item.
        kwargs: more arguments of `torch.utils.data.DataLoader`.
    """

    _accessor: AsynchronousDataAccessor | None = None

    def __init__(
        self,
        options: Options,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        require(isinstance(options, Options), f"options must be poptorch.Options, got {options!r}")
        options._freeze()
        self._options = options
        self._mode, self._drop_last = DataLoaderMode(mode), drop_last
        batches_per_item = _batches_per_item(options)
        partition = auto_distributed_partitioning and options.Distributed.numProcesses > 1
        shuffle = bool(shuffle)
        if batch_sampler is not None:
            _check_batch_sampler(batch_size, shuffle, partition)
            batch_size = getattr(batch_sampler, "batch_size", None)
        item_size = None if batch_size is None else batch_size * batches_per_item
        self._combined_batch_size = item_size
        async_options = async_options or {}
        cut = _cut(self._mode, item_size, drop_last, async_options, rebatched_worker_size)

        if isinstance(dataset, IterableDataset):
            _check_iterable(partition, num_workers, kwargs.get("worker_init_fn"))
        if batch_sampler is not None:
            kwargs["batch_sampler"] = GroupedBatches(
                batch_sampler, batches_per_item, drop_last=drop_last
            )
            if not isinstance(dataset, IterableDataset):  # which torch refuses by itself
                dataset = Batches(dataset, kwargs.pop("collate_fn", None) or default_collate)
                kwargs["collate_fn"] = concatenated
        else:
            kwargs["batch_size"] = item_size if cut is None else cut.worker_size
            kwargs["drop_last"] = drop_last and item_size is not None and cut is None
            if partition:
                kwargs["sampler"] = _process_sampler(
                    options, dataset, item_size, shuffle, drop_last, kwargs.get("sampler")
                )
            else:
                kwargs["shuffle"] = shuffle
            _warn_of_short_item(kwargs.get("sampler") or dataset, item_size, drop_last)
        super().__init__(
            dataset,
            num_workers=num_workers,
            persistent_workers=num_workers > 0
            if persistent_workers is None
            else persistent_workers,
            **kwargs,
        )
        if self._mode != DataLoaderMode.Sync:
            self._accessor = AsynchronousDataAccessor(
                self, rebatched_size=None if cut is None else cut.size, **async_options
            )

    @property
    def options(self) -> Options:
        """The options, frozen."""
        return self._options

    @property
    def combinedBatchSize(self) -> int | None:
        """Samples in an item; None if samples are not batched, or a sampler does not say."""
        return self._combined_batch_size

    def terminate(self) -> None:
        """Stop loading in the background. In mode Sync nothing does."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __iter__(self) -> Any:
        return super().__iter__() if self._accessor is None else iter(self._accessor)

    def __len__(self) -> int:
        return super().__len__() if self._accessor is None else len(self._accessor)

    def _source(self, rebatched_size: int | None) -> Source:
        """The source of an accessor's items."""
        if self._accessor is not None:
            raise createPoptorchError(
                "the loader is asynchronous already: iterate over it, or make it with "
                "DataLoaderMode.Sync",
                id="loader",
            )
        require(
            rebatched_size is not None or self._drop_last or self._combined_batch_size in (None, 1),
            "drop_last=False may make a last item with fewer samples: pass rebatched_size",
        )
        loader = self if self._mode == DataLoaderMode.Sync else self._synchronous()
        return Source(
            without_workers(loader),
            partial(loader._length, rebatched_size),
            keep_last=not self._drop_last and self.batch_sampler is not None,
        )

    def _synchronous(self) -> "DataLoader":
        """A loader of the same batches that makes them when they are asked for.

        It has only the attributes that this class needs: a subclass may not be complete yet.
        """
        loader = object.__new__(DataLoader)
        loader.__dict__.update(self.__dict__, _mode=DataLoaderMode.Sync)
        return loader

    def _length(self, rebatched_size: int | None) -> int:
        """Items of an epoch, as they are or in another size; as if workers shared a stream."""
        if rebatched_size is None:
            return super().__len__()
        size, keep_last = self._combined_batch_size, not self._drop_last
        if size is None or isinstance(self.batch_sampler, GroupedBatches):
            samples = super().__len__() * (size or 1)
            return count_items(samples, rebatched_size, keep_last=keep_last)
        is_stream = isinstance(self.dataset, IterableDataset)
        samples = len(cast(Sized, self.dataset if is_stream else self.sampler))
        used = samples if keep_last else samples // size * size
        return count_items(used, rebatched_size, keep_last=keep_last)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Batches of `worker_size` samples, cut into items of `size`."""

    size: int
    worker_size: int


def _batches_per_item(options: Options) -> int:
    """Micro-batches that one call consumes."""
    groups = options.replication_factor // options.input_group_size
    return int(options.device_iterations * groups * options.Training.gradient_accumulation)


def _check_batch_sampler(batch_size: int | None, shuffle: bool, partition: bool) -> None:
    if batch_size != 1 or shuffle:
        raise createPoptorchError(
            "batch_sampler goes with neither batch_size nor shuffle: it decides both itself",
            id="loader",
        )
    if partition:
        raise createPoptorchError(
            "batch_sampler cannot be divided among processes: pass "
            "auto_distributed_partitioning=False and a sampler of this process's batches",
            id="loader",
        )


def _cut(
    mode: DataLoaderMode,
    item_size: int | None,
    drop_last: bool,
    async_options: dict[str, Any],
    worker_size: int | None,
) -> _Cut | None:
    """How a mode cuts the batches of workers anew; None if each is an item already."""
    if mode == DataLoaderMode.Sync:
        return None
    require(
        "rebatched_size" not in async_options,
        'async_options must not hold "rebatched_size": the data loader sets it',
    )
    if item_size is None:
        if mode == DataLoaderMode.AsyncRebatched:
            raise createPoptorchError(
                "AsyncRebatched makes items of one size, which needs a batch_size: of the loader, "
                "or as an attribute of its batch_sampler",
                id="loader",
            )
        return None
    require(
        worker_size is None or 1 <= worker_size <= item_size,
        f"rebatched_worker_size {worker_size} must be positive and must not be larger than the "
        f"combined batch size {item_size}",
    )
    if item_size == 1 or (mode == DataLoaderMode.Async and drop_last):
        return None
    if mode == DataLoaderMode.Async:
        return _Cut(item_size, item_size)
    return _Cut(item_size, worker_size or item_size)


def _check_iterable(partition: bool, num_workers: int, worker_init_fn: Any) -> None:
    require(
        not partition,
        "an iterable data set cannot be divided among processes: pass "
        "auto_distributed_partitioning=False and let the data set choose its part",
    )
    if num_workers > 1 and worker_init_fn is None:
        logger.warning(
            "each of the %d workers will load the whole iterable data set: give each a part of "
            "it in worker_init_fn",
            num_workers,
        )


def _process_sampler(
    options: Options,
    dataset: Any,
    item_size: int | None,
    shuffle: bool,
    drop_last: bool,
    sampler: Any,
) -> ProcessSampler:
    """The part of the data set that this process sees."""
    require(item_size is not None, "batch_size=None cannot be divided among processes")
    require(
        not shuffle or options.exists("random_seed"),
        "several processes can only shuffle alike with a seed: call options.randomSeed() first",
    )
    if sampler is not None:
        raise createPoptorchError(
            "a sampler cannot be divided among processes: pass auto_distributed_partitioning=False",
            id="loader",
        )
    return ProcessSampler(
        len(dataset),
        item_size or 1,
        process=options.Distributed.processId,
        processes=options.Distributed.numProcesses,
        drop_last=drop_last,
        seed=options.random_seed if shuffle else None,
    )


def _warn_of_short_item(samples: Any, item_size: int | None, drop_last: bool) -> None:
    if item_size is None or not hasattr(samples, "__len__"):
        return
    if drop_last:
        if 0 < len(samples) < item_size:
            logger.warning(
                "the loader has no item: there are %d samples, and a call takes %d (batch size x "
                "device iterations x input groups x accumulation steps); make one of these smaller",
                len(samples),
                item_size,
            )
    elif rest := len(samples) % item_size:
        logger.warning(
            "drop_last=False: the last item of an epoch has %d of %d samples, which a compiled "
            "model does not take",
            rest,
            item_size,
        )


def concatenated(batches: list[Any]) -> Any:
    """One structure like each of `batches`, their tensors joined along the first dimension.

    A single batch stays as it is, with whatever else is in it.
    """
    if len(batches) == 1:
        return batches[0]
    columns = zip(*(list(tensors_of(batch)) for batch in batches), strict=True)
    return rebuilt(batches[0], iter([_joined(column) for column in columns]))


def _joined(tensors: tuple[Any, ...]) -> Tensor:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise createPoptorchError(
                f"batches can only be joined if they are made of tensors, got a "
                f"{type(tensor).__name__}: return tensors from collate_fn",
                id="loader",
            )
    return torch.cat(tensors)


def _init_sampler(self: Sampler[Any], *args: Any, **kwargs: Any) -> None:
    following = super(Sampler, self).__init__
    if getattr(following, "__objclass__", None) is object:  # no other class takes the arguments
        _only_a_source(*args, **kwargs)
    else:
        following(*args, **kwargs)


def _only_a_source(data_source: object = None) -> None:
    """Raise TypeError for other arguments."""


# In PyTorch 1 and 2.0 the samplers' base class took the data set, and ignored it. Today's class
# takes no argument, and `super().__init__(data_source)` would raise an error.
if "__init__" not in vars(Sampler):
    Sampler.__init__ = _init_sampler  # type: ignore[assignment, method-assign]
