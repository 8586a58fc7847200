"""Check the items that another process makes."""

import os
import time

import pytest
import torch
from torch.utils.data import DataLoader

import poptorch
from poptorch import AsynchronousDataAccessor, DataLoaderMode, SharingStrategy
from poptorch.data.accessor import strategy_of
from tests.batches.worker_processes import alive, children, nothing_left, worker_of
from tests.poptorch.data import datasets
from tests.poptorch.data.datasets import (
    Draws,
    Failing,
    MeasuredStream,
    Numbers,
    Pair,
    PairParser,
    Pairs,
    Slow,
    Stream,
)

pytestmark = pytest.mark.usefixtures("clean")
FORK = {"sharing_strategy": SharingStrategy.Fork}  # the quickest to start


@pytest.fixture
def clean():
    with nothing_left():
        yield


@pytest.fixture
def pairs():
    poptorch.registerCustomArgParser(Pair, PairParser())
    yield
    poptorch.registerCustomArgParser(Pair, None)


def values(accessor):
    return [item[0].item() for item in accessor]


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", list(SharingStrategy), ids=lambda strategy: strategy.name)
def test_every_strategy_gives_the_same_data(strategy, pairs):
    torch.manual_seed(3)
    expected = [
        (item[0].clone(), item[1].clone()) for item in AsynchronousDataAccessor(Draws(3), **FORK)
    ]
    torch.manual_seed(3)
    default = torch.get_default_dtype()
    accessor = AsynchronousDataAccessor(Draws(3), sharing_strategy=strategy)
    assert len(accessor) == 3
    for item, other in zip(accessor, expected, strict=True):
        assert torch.equal(item[0], other[0])
        assert torch.equal(item[1], other[1])
    assert torch.get_default_dtype() == default
    accessor.terminate()
    assert not alive(worker_of(accessor))


@pytest.mark.parametrize("indefinitely", [True, False])
@pytest.mark.parametrize("preload", [True, False])
def test_each_iteration_is_an_epoch(indefinitely, preload):
    accessor = AsynchronousDataAccessor(
        Numbers(5), 2, load_indefinitely=indefinitely, early_preload=preload, **FORK
    )
    for _ in range(3):
        assert values(accessor) == [0, 1, 2, 3, 4]
    accessor.terminate()


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_a_new_iteration_leaves_out_the_rest_of_the_last(taken):
    accessor = AsynchronousDataAccessor(Numbers(5), 1, **FORK)
    old = iter(accessor)
    assert [next(old)[0].item() for _ in range(taken)] == list(range(taken))
    assert values(accessor) == [0, 1, 2, 3, 4]
    with pytest.raises(poptorch.Error, match="another iteration of this loader has begun"):
        next(old)
    accessor.terminate()


def test_an_iteration_ends_once_and_for_all():
    epoch = iter(accessor := AsynchronousDataAccessor(Numbers(2), **FORK))
    assert len(list(epoch)) == 2
    assert list(epoch) == []
    assert len(list(accessor)) == 2


def test_the_accessor_gives_the_items_of_its_last_iteration():
    accessor = AsynchronousDataAccessor(Numbers(3), **FORK)
    assert next(accessor)[0].item() == 0
    assert [item[0].item() for item in iter(accessor)] == [0, 1, 2]
    with pytest.raises(StopIteration):
        next(accessor)
    iter(accessor)
    assert [next(accessor)[0].item() for _ in range(3)] == [0, 1, 2]
    accessor.terminate()


def test_items_are_not_copied_and_memory_is_used_again():
    items = iter(AsynchronousDataAccessor(Numbers(6), 1, **FORK))
    addresses = [next(items)[0].data_ptr() for _ in range(5)]
    assert addresses[2:] == [addresses[1]] * 3  # the first item was still there for the second


@pytest.mark.parametrize("size", [1, 3])
def test_items_that_the_program_keeps_stay_as_they_are(size):
    accessor = AsynchronousDataAccessor(Numbers(20), size, **FORK)
    for _ in range(2):
        kept = [item[0].view(1).numpy() for item in accessor]  # views of an item count, too
        assert [item.item() for item in kept] == list(range(20))
    every_third = [item for i, item in enumerate(accessor) if i % 3 == 0]
    assert [item[1].item() for item in every_third] == list(range(0, -20, -3))


def test_a_loop_that_drops_its_items_allocates_nothing():
    accessor = AsynchronousDataAccessor(Numbers(9), 3, **FORK)
    ring = accessor._worker.ring
    for _ in range(4):
        assert values(accessor) == list(range(9))
    assert ring._count <= 2 * 3


@pytest.mark.parametrize(("preload", "full"), [(False, 1), (True, 4)])
def test_the_buffer_is_filled_early_or_not(preload, full):
    accessor = AsynchronousDataAccessor(Numbers(9), 4, early_preload=preload, **FORK)
    time.sleep(0.3)
    assert sum(accessor._worker._data_buffers.indices_mem) == full


@pytest.mark.parametrize("indefinitely", [False, True])
def test_the_next_epoch_is_begun_early_or_not(indefinitely):
    accessor = AsynchronousDataAccessor(Numbers(2), load_indefinitely=indefinitely, **FORK)
    assert len(values(accessor)) == 2
    time.sleep(0.3)
    assert sum(accessor._worker._data_buffers.indices_mem) == (3 if indefinitely else 0)


def test_the_process_rests_when_the_buffer_is_full():
    accessor = AsynchronousDataAccessor(Numbers(4), 1, miss_sleep_time_in_ms=150, **FORK)
    start = time.monotonic()
    for _ in accessor:
        time.sleep(0.05)
    assert time.monotonic() - start >= 3 * 0.15


def test_a_source_without_an_end_can_be_read_once():
    accessor = AsynchronousDataAccessor(iter(torch.arange(3.0)), **FORK)
    assert [[item.item() for item in accessor] for _ in range(2)] == [[0, 1, 2], []]


def test_structures_arrive_as_they_were(pairs):
    items = [
        (torch.ones(2), [torch.zeros(1), torch.tensor(3)]),
        {"b": torch.ones(1), "a": torch.zeros(2)},
        torch.ones(2),
    ]
    for item in items:
        (other,) = AsynchronousDataAccessor([item], **FORK)
        assert str(other) == str(item)
    seen = [(p.one.item(), p.two.item(), p.word) for p in AsynchronousDataAccessor(Pairs(3))]
    assert seen == [(0, 0, "number 0"), (1, -1, "number 1"), (2, -2, "number 2")]


def test_a_stream_has_the_length_that_it_says():
    assert len(AsynchronousDataAccessor(MeasuredStream(4), **FORK)) == 4
    with pytest.raises(TypeError, match="'Stream' has no len"):
        len(AsynchronousDataAccessor(Stream(4), **FORK))


@pytest.mark.parametrize("source", ["set", "loader"])
def test_samples_are_joined(source):
    samples = [torch.tensor([float(i)]) for i in range(7)]
    data = samples if source == "set" else DataLoader(MeasuredStream(7), batch_size=1)
    accessor = AsynchronousDataAccessor(data, rebatched_size=3, **FORK)
    assert len(accessor) == 2
    for _ in range(2):
        assert [item.tolist() for item in accessor] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torch_is_read(workers):
    loader = DataLoader(Numbers(6), batch_size=2, num_workers=workers)
    accessor = AsynchronousDataAccessor(loader)
    for _ in range(2):
        assert datasets.numbers(accessor) == [[0, 1], [2, 3], [4, 5]]
    assert loader.worker_init_fn is None
    accessor.terminate()


@pytest.mark.parametrize("strategy", [SharingStrategy.Fork, SharingStrategy.ForkServer])
@pytest.mark.parametrize("ours", [True, False])
def test_a_loader_with_workers_of_its_own_keeps_them(strategy, ours):
    settings = {"batch_size": 2, "num_workers": 1, "persistent_workers": True}
    loader = (
        poptorch.DataLoader(poptorch.Options(), Numbers(4), **settings)
        if ours
        else DataLoader(Numbers(4), **settings)
    )
    items = iter(loader)
    next(items)
    accessor = AsynchronousDataAccessor(loader, sharing_strategy=strategy)
    assert datasets.numbers(accessor) == [[0, 1], [2, 3]]
    assert next(items)[0].tolist() == [2, 3]
    assert datasets.numbers(loader) == [[0, 1], [2, 3]]
    accessor.terminate()


# random numbers


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_seed_decides_what_is_drawn(workers):
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loader = DataLoader(Draws(4), num_workers=workers, shuffle=True)
        accessor = AsynchronousDataAccessor(loader, load_indefinitely=seed == 1, **FORK)
        next(iter(accessor))  # and not the rest of the epoch
        runs.append([[part.tolist() for part in item] for _ in range(2) for item in accessor])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][:4] != runs[0][4:]


# what is refused


@pytest.mark.parametrize(
    "settings",
    [
        {"buffer_size": 0},
        {"buffer_size": 1.5},
        {"miss_sleep_time_in_ms": -1},
        {"sharing_strategy": 7},
        {"rebatched_size": 1},
    ],
    ids=str,
)
def test_settings_out_of_bounds_are_refused(settings):
    with pytest.raises(AssertionError, match=next(iter(settings))):
        AsynchronousDataAccessor(Numbers(3), **settings)


def test_loaders_that_cannot_be_read_are_refused():
    loader = poptorch.DataLoader(poptorch.Options(), Numbers(4), mode=DataLoaderMode.Async)
    with pytest.raises(poptorch.Error, match="asynchronous already"):
        AsynchronousDataAccessor(loader)
    loader = poptorch.DataLoader(poptorch.Options(), Numbers(4), 2, drop_last=False)
    with pytest.raises(AssertionError, match="rebatched_size"):
        AsynchronousDataAccessor(loader)
    with pytest.raises(AssertionError, match="batch size 1, got 2"):
        AsynchronousDataAccessor(DataLoader(Numbers(4), batch_size=2), rebatched_size=2)


def test_an_epoch_of_less_than_one_item_has_none():
    accessor = AsynchronousDataAccessor([torch.ones(1)] * 2, rebatched_size=3, **FORK)
    assert [list(accessor) for _ in range(3)] == [[], [], []]


def test_an_empty_data_set_is_refused(capfd):
    with pytest.raises(poptorch.Error, match=r"failed to start .Check above for details.*is empty"):
        AsynchronousDataAccessor([], rebatched_size=3, **FORK)
    assert "is empty, or smaller than one item" in capfd.readouterr().err


def test_a_data_set_that_cannot_be_pickled_is_refused():
    with pytest.raises(poptorch.Error, match=r"failed to start.*lambda.*SharingStrategy\.Fork"):
        AsynchronousDataAccessor([lambda: 0])


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch):
    def refuse(self):
        raise OSError("no more processes")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    with pytest.raises(poptorch.Error) as caught:
        AsynchronousDataAccessor(Numbers(3), **FORK)
    assert caught.value.message.endswith("for details): no more processes")
    assert caught.value.id == "loader"


# failures


def test_a_failure_at_the_start_is_shown_and_named(capfd):
    with pytest.raises(poptorch.Error, match=r"worker thread failed to start .*no sample 0"):
        AsynchronousDataAccessor(Failing(4, 0), **FORK)
    assert "KeyError: 'no sample 0'" in capfd.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_a_later_failure_comes_after_the_items_before_it(workers, capfd):
    loader = DataLoader(Failing(6, 3), num_workers=workers)
    accessor = AsynchronousDataAccessor(loader, 2, **FORK)
    seen = []
    with pytest.raises(AssertionError, match=r"An error occurred in the data fetcher.*process"):
        seen += (item[0].item() for item in accessor)
    epoch = iter(accessor)
    with pytest.raises(AssertionError, match="An error occurred in the data fetcher"):
        next(epoch)
    assert "no sample 3" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (torch.zeros(3), r"float32\[3\].*float32\[2\]"),
        (torch.full((2,), 2**24 + 1), r"int64\[2\]"),
        ([torch.zeros(2)] * 2, "2 tensors"),
        (1.0, "must be made of tensors, got a float"),
    ],
)
def test_an_item_unlike_the_first_is_refused(second, text):
    items = iter(AsynchronousDataAccessor([torch.zeros(2), second], **FORK))
    next(items)
    with pytest.raises(AssertionError, match=f"data fetcher.*{text}"):
        next(items)


class Noted(Numbers):
    def __getitem__(self, index):
        if index:
            raise poptorch.createPoptorchError("the text of the error", id="input")
        return super().__getitem__(index)


def test_a_failure_has_the_text_of_an_error_and_not_its_notes():
    items = iter(AsynchronousDataAccessor(Noted(3), **FORK))
    next(items)
    with pytest.raises(AssertionError, match=r"data fetcher: .*Error: .*the text of the error"):
        next(items)


def test_an_interrupt_in_the_data_set_is_quiet(capfd):
    accessor = AsynchronousDataAccessor(Failing(4, 1, KeyboardInterrupt), **FORK)
    with pytest.raises(AssertionError, match=r"data fetcher.*KeyboardInterrupt"):
        list(accessor)
    assert capfd.readouterr().err == ""


# the end


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["terminate", "delete"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_processes_end_also_in_the_middle_of_an_item(how, workers):
    accessor = AsynchronousDataAccessor(
        DataLoader(Slow(9, 60), num_workers=workers, persistent_workers=workers > 0), **FORK
    )
    iter(accessor)
    time.sleep(0.1)
    pid = worker_of(accessor)
    assert len(children(pid)) == workers
    start = time.monotonic()
    if how == "terminate":
        accessor.terminate()
        accessor.terminate()
        with pytest.raises(AssertionError, match=f"process {pid} was stopped"):
            next(iter(accessor))
    else:
        del accessor
    assert not alive(pid)
    assert time.monotonic() - start < 5


def test_a_copy_of_the_program_leaves_the_accessor_alone():
    accessor = AsynchronousDataAccessor(Numbers(3), **FORK)
    if not (child := os.fork()):
        accessor.terminate()
        os._exit(0)
    os.waitpid(child, 0)
    assert values(accessor) == [0, 1, 2]


@pytest.mark.parametrize("strategy", ["SharedMemory", poptorch.SharingStrategy.SharedMemory, 0])
def test_a_strategy_is_a_member_its_number_or_its_name(strategy):
    assert strategy_of(strategy) is poptorch.SharingStrategy.SharedMemory


@pytest.mark.parametrize("wrong", ["sharedmemory", "", 7, None])
def test_another_strategy_is_refused(wrong):
    with pytest.raises(AssertionError, match="SharingStrategy or the name of one"):
        strategy_of(wrong)
