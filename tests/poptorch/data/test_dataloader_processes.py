"""Check how several processes share one data set."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from tests.poptorch.data.datasets import Lengths, Numbers, Stream, flat, numbers


def process(number, count, seed=None):
    options = poptorch.Options()
    options.Distributed.configureProcessId(number, count)
    return options if seed is None else options.randomSeed(seed)


@given(
    length=st.integers(0, 60),
    item=st.integers(1, 4),
    processes=st.integers(2, 5),
    drop_last=st.booleans(),
)
def test_processes_divide_a_data_set_in_order(length, item, processes, drop_last):
    parts = []
    for number in range(processes):
        loader = poptorch.DataLoader(
            process(number, processes), Numbers(length), item, drop_last=drop_last
        )
        assert loader.combinedBatchSize == item
        items = numbers(loader)
        assert len(items) == len(loader)
        parts.append(flat(items))
    if drop_last:
        size = item * (length // (item * processes))
        assert [len(part) for part in parts] == [size] * processes
    else:
        more = length % processes
        assert [len(part) for part in parts] == [
            length // processes + (number < more) for number in range(processes)
        ]
    assert flat(parts) == list(range(sum(map(len, parts))))


def test_every_epoch_draws_another_order():
    loader = poptorch.DataLoader(process(1, 2, seed=7), Numbers(100), 16, shuffle=True)
    epochs = [sorted(flat(numbers(loader))) for _ in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = poptorch.DataLoader(process(1, 2, seed=7), Numbers(100), 16, shuffle=True)
    assert sorted(flat(numbers(again))) == epochs[0]


def test_the_user_can_divide():
    loader = poptorch.DataLoader(process(1, 2), Numbers(4), 2, auto_distributed_partitioning=False)
    assert numbers(loader) == [[0, 1], [2, 3]]
    sampler = torch.utils.data.DistributedSampler(Numbers(4), 2, 1, shuffle=False)
    loader = poptorch.DataLoader(
        process(1, 2), Numbers(4), 2, auto_distributed_partitioning=False, sampler=sampler
    )
    assert numbers(loader) == [[1, 3]]


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (poptorch.DataLoader(process(1, 2), Numbers(8), 2), [[4, 5], [6, 7]]),
        (
            poptorch.DataLoader(poptorch.Options(), Numbers(4), batch_sampler=[[3], [1, 2]]),
            [[3], [1, 2]],
        ),
    ],
    ids=["sampler", "batch_sampler"],
)
def test_a_loader_of_the_version_before_is_read(loader, expected):
    new, old = b"ipu_dynamo.batches.sampling\n", b"poptorch.data.sampling\n"
    pickled = pickle.dumps(loader, protocol=0)
    assert new in pickled
    pickled = pickled.replace(new, old).replace(
        b"poptorch.data.loader\nconcatenated", old + b"concatenated"
    )
    assert numbers(pickle.loads(pickled)) == expected


@pytest.mark.parametrize(
    ("dataset", "arguments", "error", "text"),
    [
        (Numbers(4), {"batch_size": None}, AssertionError, "batch_size=None"),
        (Numbers(4), {"shuffle": True}, AssertionError, "randomSeed"),
        (Stream(4), {}, AssertionError, "auto_distributed_partitioning=False"),
        (Numbers(4), {"batch_sampler": Lengths(4)}, poptorch.Error, "batch_sampler cannot be"),
        (Numbers(4), {"sampler": [0, 1]}, poptorch.Error, "sampler cannot be divided"),
    ],
)
def test_what_cannot_be_divided_is_refused(dataset, arguments, error, text):
    with pytest.raises(error, match=text):
        poptorch.DataLoader(process(0, 2), dataset, **arguments)
