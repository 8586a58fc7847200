"""Compare the items of the asynchronous modes with those of a loader without processes."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

import poptorch
from poptorch import AsynchronousDataAccessor, DataLoaderMode, SharingStrategy
from tests.batches.worker_processes import nothing_left, worker_of
from tests.poptorch.data.datasets import (
    Lengths,
    MeasuredStream,
    Numbers,
    SharedStream,
    Stream,
    flat,
    numbers,
)

FORK = {"sharing_strategy": SharingStrategy.Fork}  # the quickest to start
ASYNC, REBATCHED = DataLoaderMode.Async, DataLoaderMode.AsyncRebatched


@pytest.fixture(autouse=True)
def clean():
    with nothing_left():
        yield


def loader(dataset, *arguments, options=None, **settings):
    options = options or poptorch.Options()
    return poptorch.DataLoader(options, dataset, *arguments, async_options=FORK, **settings)


def copies(items):
    return [[part.clone() for part in item] for item in items]


@st.composite
def settings(draw):
    """Options of a loader, and what else it is made with but for its mode."""
    options = {
        "iterations": draw(st.integers(1, 2)),
        "accumulation": draw(st.integers(1, 2)),
        "replicas": draw(st.integers(1, 2)),
        "processes": draw(st.integers(1, 3)),
    }
    arguments = {
        "batch_size": draw(st.integers(1, 3)),
        "drop_last": draw(st.booleans()),
        "shuffle": draw(st.booleans()),
        "num_workers": draw(st.sampled_from([0, 0, 2])),
    }
    return options, arguments


def options_of(iterations, accumulation, replicas, processes, process):
    options = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    options.randomSeed(3).Distributed.configureProcessId(process, processes)
    return options


@pytest.mark.examples(12)
@given(
    length=st.integers(0, 60),
    settings=settings(),
    mode=st.sampled_from([ASYNC, REBATCHED]),
    data=st.data(),
)
def test_items_are_those_of_mode_sync(length, settings, mode, data):
    options, arguments = settings
    process = data.draw(st.integers(0, options["processes"] - 1))

    def made(mode, **more):
        torch.manual_seed(5)
        return loader(
            Numbers(length),
            options=options_of(**options, process=process),
            mode=mode,
            generator=torch.Generator().manual_seed(1),
            **arguments,
            **more,
        )

    plain = made(DataLoaderMode.Sync)
    expected = [copies(plain) for _ in range(2)]
    size = data.draw(st.none() | st.integers(1, plain.combinedBatchSize))
    if not expected[0] and (mode == ASYNC or not len(plain.sampler)):
        with pytest.raises(poptorch.Error, match="failed to start"):
            made(mode, rebatched_worker_size=size)
        return
    other = made(mode, rebatched_worker_size=size)
    assert len(other) == len(plain) == len(expected[0])
    assert other.combinedBatchSize == plain.combinedBatchSize
    for epoch in expected:
        for item, parts in itertools.zip_longest(other, epoch):
            assert all(torch.equal(a, b) for a, b in zip(item, parts, strict=True))
    other.terminate()


@pytest.mark.examples(12)
@given(
    length=st.integers(1, 40),
    size=st.integers(1, 7),
    worker_size=st.none() | st.integers(1, 7),
    workers=st.integers(1, 2),
    drop_last=st.booleans(),
)
def test_what_workers_leave_over_of_a_stream_is_joined(
    length, size, worker_size, workers, drop_last
):
    assume(length >= size or not drop_last)
    assume(worker_size is None or worker_size <= size)
    assume(size > 1 or drop_last)
    made = loader(
        SharedStream(length),
        size,
        mode=REBATCHED,
        num_workers=workers,
        worker_init_fn=abs,  # no more than a sign that the workers' parts differ
        drop_last=drop_last,
        rebatched_worker_size=worker_size,
    )
    rounded = math.floor if drop_last else math.ceil
    for _ in range(2):
        items = numbers(made)
        assert len(items) == len(made) == rounded(length / size)
        assert {len(item) for item in items[:-1]} <= {size}
        used = flat(items)
        assert len(used) == len(set(used)) == (length // size * size if drop_last else length)
        assert set(used) <= set(range(length))
    made.terminate()


@pytest.mark.parametrize("mode", [ASYNC, REBATCHED])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("length", [7, 12])
def test_batches_of_a_sampler_are_joined(mode, drop_last, length):
    def made(mode):
        sampler = BatchSampler(SequentialSampler(range(length)), 2, drop_last)
        return loader(
            Numbers(length),
            options=poptorch.Options().deviceIterations(2),
            batch_sampler=sampler,
            drop_last=drop_last,
            mode=mode,
        )

    plain, other = made(DataLoaderMode.Sync), made(mode)
    assert len(other) == len(plain)
    assert numbers(other) == numbers(plain)


def test_a_sampler_without_a_batch_size_may_leave_a_shorter_item():
    made = loader(
        Numbers(9),
        options=poptorch.Options().deviceIterations(3),
        batch_sampler=Lengths(9),
        drop_last=False,
        mode=ASYNC,
    )
    assert numbers(made) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    with pytest.raises(poptorch.Error, match="batch_size"):
        loader(Numbers(9), batch_sampler=Lengths(9), mode=REBATCHED)


@pytest.mark.parametrize("dataset", [Numbers(3), Stream(3)], ids=type)
def test_no_batch_size_passes_samples_through(dataset):
    made = loader(dataset, None, mode=ASYNC)
    assert made.combinedBatchSize is None
    assert numbers(made) == [0, 1, 2]
    with pytest.raises(poptorch.Error, match="needs a batch_size"):
        loader(dataset, None, mode=REBATCHED)


def test_a_stream_without_a_length_has_none():
    made = loader(Stream(5), 2, mode=REBATCHED)
    assert numbers(made) == [[0, 1], [2, 3]]
    with pytest.raises(TypeError, match="'Stream' has no len"):
        len(made)


@pytest.mark.parametrize("mode", [ASYNC, REBATCHED])
def test_settings_that_contradict_the_mode_are_refused(mode):
    with pytest.raises(AssertionError, match='must not hold "rebatched_size"'):
        poptorch.DataLoader(
            poptorch.Options(), Numbers(3), mode=mode, async_options={"rebatched_size": 2}
        )
    for size in (0, 3):
        with pytest.raises(AssertionError, match=f"rebatched_worker_size {size} "):
            loader(Numbers(3), 2, mode=mode, rebatched_worker_size=size)


def test_options_reach_the_accessor():
    with pytest.raises(AssertionError, match="buffer_size"):
        poptorch.DataLoader(
            poptorch.Options(), Numbers(3), mode=ASYNC, async_options={"buffer_size": 0}
        )
    with pytest.raises(TypeError, match="nonsense"):
        poptorch.DataLoader(
            poptorch.Options(), Numbers(3), mode=ASYNC, async_options={"nonsense": 0}
        )


def test_training_is_that_of_mode_sync():
    def weight(mode):
        torch.manual_seed(0)
        model = Regression()
        data = torch.utils.data.TensorDataset(torch.randn(16, 2), torch.randn(16, 2))
        options = poptorch.Options().deviceIterations(2)
        options.showCompilationProgressBar(False)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, options, optimizer)
        made = loader(data, 2, options=options, mode=mode)
        losses = [training(x, y)[1].item() for _ in range(2) for x, y in made]
        made.terminate()
        return losses, model.layer.weight.detach().clone()

    losses, expected = weight(DataLoaderMode.Sync)
    for mode in (ASYNC, REBATCHED):
        others, other = weight(mode)
        assert others == losses
        assert torch.equal(other, expected)
    assert len(set(losses)) == 8


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x, y):
        out = self.layer(x)
        return out, torch.nn.functional.mse_loss(out, y)


# a loader's process


def test_terminating_a_loader_ends_its_process_and_may_be_repeated():
    made = loader(Numbers(4), 2, mode=ASYNC)
    for _ in range(2):
        made.terminate()
    with pytest.raises(AssertionError, match=f"process {worker_of(made._accessor)} was stopped"):
        next(iter(made))
    loader(Numbers(4)).terminate()


def test_a_subclass_may_change_its_items_and_share_bases():
    class Second(torch.utils.data.DataLoader):
        def __init__(self, dataset, **arguments):
            super().__init__(dataset, collate_fn=torch.utils.data.default_collate, **arguments)

    class Doubling(poptorch.DataLoader, Second):
        def __iter__(self):
            return ((2 * x, y) for x, y in super().__iter__())

    made = Doubling(
        options=poptorch.Options(),
        dataset=Numbers(4),
        batch_size=2,
        mode=ASYNC,
        async_options=FORK,
    )
    assert numbers(made) == [[0, 2], [4, 6]]
    plain = Doubling(options=poptorch.Options(), dataset=Numbers(4), batch_size=2)
    assert numbers(AsynchronousDataAccessor(plain, **FORK)) == [[0, 2], [4, 6]]


@pytest.mark.parametrize("size", [2, 4])
def test_a_loader_that_a_user_wraps_is_cut_anew(size):
    plain = poptorch.DataLoader(poptorch.Options(), Numbers(8), 3, drop_last=False)
    accessor = AsynchronousDataAccessor(plain, rebatched_size=size, **FORK)
    assert len(accessor) == 8 // size
    assert flat(numbers(accessor)) == list(range(8))
    plain = poptorch.DataLoader(poptorch.Options(), MeasuredStream(8), 3)
    accessor = AsynchronousDataAccessor(plain, rebatched_size=size, **FORK)
    assert len(accessor) == 6 // size
    assert flat(numbers(accessor)) == list(range(6 // size * size))
