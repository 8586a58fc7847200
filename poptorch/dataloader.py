"""Load data in items of as many samples as one call of a model consumes."""

from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from poptorch._logging import logger
from poptorch.enums import DataLoaderMode
from poptorch.errors import createPoptorchError, require
from poptorch.options import Options
from poptorch.sampling import Batches, GroupedBatches, ProcessSampler, concatenated


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A torch data loader whose items feed one call.

    Each item has `combinedBatchSize` samples: the micro-batch size times device iterations, input
    groups and accumulation steps. With several processes, each loads its own part.

    Args:
        options: what the model will be compiled with; they are frozen.
        dataset: map-style or iterable.
        batch_size: samples of one micro-batch; None passes samples through as they are.
        shuffle: draw a new order for every epoch.
        num_workers: processes that load; 0 loads in this one.
        drop_last: leave out an incomplete last item.
        persistent_workers: keep workers between epochs; None keeps them if there are any.
        auto_distributed_partitioning: divide a map-style data set among processes.
        mode: Sync. Async and AsyncRebatched are not available yet.
        async_options, rebatched_worker_size: of the other modes.
        batch_sampler: gives lists of indices; several of its batches make an item.
        kwargs: more arguments of `torch.utils.data.DataLoader`.
    """

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
        batches_per_item = _batches_per_item(options)
        partition = auto_distributed_partitioning and options.Distributed.numProcesses > 1
        shuffle = bool(shuffle)
        if batch_sampler is not None:
            _check_batch_sampler(batch_size, shuffle, partition)
            batch_size = getattr(batch_sampler, "batch_size", None)
        item_size = None if batch_size is None else batch_size * batches_per_item
        self._combined_batch_size = item_size
        _check_mode(mode, async_options, rebatched_worker_size, item_size)

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
            kwargs["batch_size"] = item_size
            kwargs["drop_last"] = drop_last and item_size is not None
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


def _batches_per_item(options: Options) -> int:
    """Micro-batches that one call consumes."""
    groups = options.replication_factor // options.input_group_size
    return int(options.device_iterations * groups * options.Training.gradient_accumulation)


def _check_batch_sampler(batch_size: int | None, shuffle: bool, partition: bool) -> None:
    if batch_size != 1 or shuffle:
        raise createPoptorchError(
            "batch_sampler goes with neither batch_size nor shuffle: it decides both itself"
        )
    if partition:
        raise createPoptorchError(
            "batch_sampler cannot be divided among processes: pass "
            "auto_distributed_partitioning=False and a sampler of this process's batches"
        )


def _check_mode(
    mode: DataLoaderMode,
    async_options: dict[str, Any] | None,
    rebatched_worker_size: int | None,
    item_size: int | None,
) -> None:
    """Refuse settings that contradict an asynchronous mode, and then the mode itself."""
    if mode == DataLoaderMode.Sync:
        return
    require(
        "rebatched_size" not in (async_options or {}),
        'async_options must not hold "rebatched_size": the data loader sets it',
    )
    if rebatched_worker_size is not None and item_size is not None:
        require(
            rebatched_worker_size <= item_size,
            f"rebatched_worker_size {rebatched_worker_size} must not be larger than the combined "
            f"batch size {item_size}",
        )
    raise createPoptorchError(
        f"DataLoaderMode.{DataLoaderMode(mode).name} is not available yet: use "
        "poptorch.DataLoaderMode.Sync, with num_workers > 0 to load in other processes"
    )


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
            "a sampler cannot be divided among processes: pass auto_distributed_partitioning=False"
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
    if drop_last or item_size is None or not hasattr(samples, "__len__"):
        return
    if rest := len(samples) % item_size:
        logger.warning(
            "drop_last=False: the last item of an epoch has %d of %d samples, which a compiled "
            "model does not take",
            rest,
            item_size,
        )
