"""Check the items that a data loader makes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

import poptorch
from poptorch import CommGroupType
from tests.poptorch.data.datasets import Lengths, MeasuredStream, Numbers, Stream, flat, numbers


class Manifold(Numbers):
    """Numbers that are read many at a time."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@given(
    length=st.integers(0, 40),
    batch=st.integers(1, 3),
    iterations=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    groups=st.integers(1, 2),
    size=st.integers(1, 2),
    drop_last=st.booleans(),
)
def test_an_item_is_what_one_call_consumes(
    length, batch, iterations, accumulation, groups, size, drop_last
):
    options = poptorch.Options().deviceIterations(iterations).replicationFactor(groups * size)
    options.inputReplicaGrouping(size, CommGroupType.Consecutive)
    options.Training.gradientAccumulation(accumulation)
    loader = poptorch.DataLoader(options, Numbers(length), batch_size=batch, drop_last=drop_last)
    combined = batch * iterations * accumulation * groups
    assert loader.combinedBatchSize == combined
    items = list(loader)
    whole, rest = divmod(length, combined)
    sizes = [combined] * whole + ([rest] if rest and not drop_last else [])
    assert [len(first) for first, _ in items] == sizes
    assert len(loader) == len(sizes)
    for part in (0, 1):
        values = torch.cat([item[part] for item in items]) if items else torch.tensor([])
        assert values.abs().tolist() == list(range(sum(sizes)))
    assert loader.options is options
    with pytest.raises(AttributeError, match="frozen"):
        options.deviceIterations(2)


def test_options_come_first():
    with pytest.raises(AssertionError, match=r"poptorch\.Options"):
        poptorch.DataLoader(Numbers(3), Numbers(3))


def test_defaults_follow_poptorch():
    loader = poptorch.DataLoader(poptorch.Options(), Numbers(7), 2, num_workers=0)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert numbers(loader) == [[0, 1], [2, 3], [4, 5]]
    assert not loader.persistent_workers
    loader.terminate()
    assert len(numbers(loader)) == 3


@pytest.mark.parametrize("persistent", [None, False])
def test_workers_stay_unless_told(persistent):
    loader = poptorch.DataLoader(
        poptorch.Options(), Numbers(6), 2, num_workers=2, persistent_workers=persistent
    )
    assert loader.persistent_workers == (persistent is None)
    assert numbers(loader) == numbers(loader) == [[0, 1], [2, 3], [4, 5]]


def test_no_batch_size_passes_samples_through():
    for dataset in (Numbers(3), Stream(3)):
        loader = poptorch.DataLoader(poptorch.Options().deviceIterations(4), dataset, None)
        assert loader.combinedBatchSize is None
        assert numbers(loader) == [0, 1, 2]


def test_shuffling_keeps_the_samples():
    loader = poptorch.DataLoader(poptorch.Options(), Numbers(50), 10, shuffle=True)
    epochs = [numbers(loader), numbers(loader)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(flat(epoch)) == list(range(50))


def test_more_arguments_are_torchs():
    loader = poptorch.DataLoader(
        poptorch.Options(), Numbers(4), 2, collate_fn=lambda samples: torch.tensor(len(samples))
    )
    assert numbers(loader) == [2, 2]


def test_a_short_last_item_is_announced(capsys):
    options = poptorch.Options().deviceIterations(2)
    poptorch.DataLoader(options, Numbers(8), 2, drop_last=False)
    poptorch.DataLoader(options, Numbers(9), 2, drop_last=True)
    poptorch.DataLoader(options, Numbers(9), None, drop_last=False)
    assert not capsys.readouterr().err
    poptorch.DataLoader(options, Numbers(9), 2, drop_last=False)
    assert "the last item of an epoch has 1 of 4 samples" in capsys.readouterr().err


def test_an_exception_of_the_data_set_comes_out():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        next(iter(poptorch.DataLoader(poptorch.Options(), Broken(3))))


def test_their_settings_are_ignored_in_mode_sync():
    loader = poptorch.DataLoader(
        poptorch.Options(),
        Numbers(3),
        async_options={"rebatched_size": 2},
        rebatched_worker_size=9,
    )
    assert len(loader) == 3


# batch samplers


@given(
    length=st.integers(0, 30),
    batch=st.integers(1, 3),
    iterations=st.integers(1, 3),
    drop_last=st.booleans(),
    dataset=st.sampled_from([Numbers, Manifold]),
)
def test_batches_of_a_sampler_are_joined(length, batch, iterations, drop_last, dataset):
    samples = dataset(length)
    sampler = BatchSampler(SequentialSampler(samples), batch, drop_last)
    loader = poptorch.DataLoader(
        poptorch.Options().deviceIterations(iterations),
        samples,
        batch_sampler=sampler,
        drop_last=drop_last,
    )
    combined = batch * iterations
    assert loader.combinedBatchSize == combined
    used = length // combined * combined if drop_last else length
    expected = [list(range(i, min(i + combined, used))) for i in range(0, used, combined)]
    assert numbers(loader) == expected
    assert len(loader) == len(expected)
    assert all(torch.equal(first, -second.float()) for first, second in loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_is_collated_by_itself(workers):
    loader = poptorch.DataLoader(
        poptorch.Options().deviceIterations(2),
        Numbers(6),
        batch_sampler=Lengths(6),
        collate_fn=padded,
        num_workers=workers,
    )
    assert loader.combinedBatchSize is None
    items = list(loader)
    assert [item["x"].tolist() for item in items] == [[0, -1, -1, 1, 2, -1]]


def padded(samples):
    values = [first for first, _ in samples]
    return {"x": torch.stack(values + [torch.tensor(-1.0)] * (3 - len(values)))}


def test_registered_classes_are_joined():
    class Batch:
        def __init__(self, data):
            self.data = data

    class Parser(poptorch.ICustomArgParser):
        def yieldTensors(self, struct):  # noqa: N802
            yield struct.data

        def reconstruct(self, original_structure, tensor_iterator):
            return Batch(next(tensor_iterator))

    poptorch.registerCustomArgParser(Batch, Parser())
    try:
        loader = poptorch.DataLoader(
            poptorch.Options().deviceIterations(3),
            Numbers(6),
            batch_sampler=Lengths(6),
            collate_fn=lambda samples: Batch(padded(samples)["x"]),
        )
        (item,) = loader
        assert item.data.tolist() == [0, -1, -1, 1, 2, -1, 3, 4, 5]
    finally:
        poptorch.registerCustomArgParser(Batch, None)


def test_only_tensors_can_be_joined():
    options = poptorch.Options().deviceIterations(2)
    loader = poptorch.DataLoader(options, Numbers(6), batch_sampler=Lengths(6), collate_fn=len)
    with pytest.raises(poptorch.Error, match="made of tensors, got a int"):
        next(iter(loader))


def test_a_batch_that_is_an_item_stays_as_it_was_made():
    loader = poptorch.DataLoader(
        poptorch.Options(), Numbers(6), batch_sampler=Lengths(6), collate_fn=lambda x: ("name", x)
    )
    assert [(name, len(samples)) for name, samples in loader] == [("name", n) for n in (1, 2, 3)]


@pytest.mark.parametrize("arguments", [{"batch_size": 2}, {"batch_size": None}, {"shuffle": True}])
def test_a_batch_sampler_decides_alone(arguments):
    with pytest.raises(poptorch.Error, match="neither batch_size nor shuffle"):
        poptorch.DataLoader(poptorch.Options(), Numbers(6), batch_sampler=Lengths(6), **arguments)


def test_the_attributes_of_the_data_set_stay_in_reach():
    loader = poptorch.DataLoader(poptorch.Options(), Numbers(6), batch_sampler=Lengths(6))
    assert loader.dataset.length == 6


# iterable data sets


def test_a_stream_is_cut_into_items():
    options = poptorch.Options().deviceIterations(2)
    assert numbers(poptorch.DataLoader(options, Stream(5))) == [[0, 1], [2, 3]]
    loader = poptorch.DataLoader(options, MeasuredStream(5), drop_last=False)
    assert len(loader) == 3
    assert numbers(loader) == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="len"):
        len(poptorch.DataLoader(options, Stream(5)))


@pytest.mark.parametrize(("samples", "warned"), [(0, False), (7, True), (8, False)])
def test_data_for_less_than_one_call_are_announced(capsys, samples, warned):
    options = poptorch.Options().deviceIterations(2)
    loader = poptorch.DataLoader(options, torch.arange(samples), batch_size=4)
    assert len(loader) == samples // 8
    said = "no item: there are 7 samples, and a call takes 8" in capsys.readouterr().err
    assert said == warned


@pytest.mark.parametrize(("workers", "init", "warned"), [(1, 0, 0), (2, 0, 1), (2, 1, 0)])
def test_workers_that_all_load_everything_are_announced(capsys, workers, init, warned):
    arguments = {"worker_init_fn": print} if init else {}
    poptorch.DataLoader(poptorch.Options(), Stream(5), num_workers=workers, **arguments)
    assert ("worker_init_fn" in capsys.readouterr().err) == warned


@pytest.mark.parametrize("arguments", [{"shuffle": True}, {"batch_sampler": [[0, 1]]}])
def test_torch_refuses_to_choose_from_a_stream(arguments):
    with pytest.raises(ValueError, match="IterableDataset"):
        poptorch.DataLoader(poptorch.Options(), Stream(5), **arguments)
