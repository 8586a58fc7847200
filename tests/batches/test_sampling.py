"""Check which samples each of several processes loads."""

from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.batches.sampling import ProcessSampler


@given(
    length=st.integers(0, 60),
    item=st.integers(1, 6),
    processes=st.integers(2, 5),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_processes_shuffle_alike_and_two_epochs_see_everything(
    length, item, processes, drop_last, seed
):
    samplers = [
        ProcessSampler(length, item, process=p, processes=processes, drop_last=drop_last, seed=seed)
        for p in range(processes)
    ]
    epochs = []
    for _ in range(4):
        parts = [list(sampler) for sampler in samplers]
        assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
        together = [sample for part in parts for sample in part]
        assert len(set(together)) == len(together)
        assert set(together) <= set(range(length))
        epochs.append(together)
    left_over = length - len(epochs[0])
    assert not left_over or drop_last
    if left_over <= len(epochs[0]):  # else two epochs are too short for it
        for one, two in ((0, 1), (2, 3)):
            assert set(epochs[one]) | set(epochs[two]) == set(range(length))
