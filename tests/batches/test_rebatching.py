"""Check that cutting batches anew keeps all rows in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.batches.rebatching import batch_slices
from ipu_dynamo.errors import BatchError


def tensors_of(batch):
    if isinstance(batch, torch.Tensor):
        return [batch]
    return list(batch.values() if isinstance(batch, dict) else batch)


@given(rows=st.lists(st.integers(0, 7), max_size=8), size=st.integers(1, 9))
def test_rows_stay_in_order_and_items_are_full(rows, size):
    everything = torch.arange(sum(rows))
    batches = [{"x": part, "y": -part} for part in everything.split(rows)] if rows else []
    items = [[]]
    for part in batch_slices(batches, size, tensors_of):
        x, y = part.tensors
        assert torch.equal(x, -y)
        assert part.start == len(items[-1])
        items[-1] += x.tolist()
        assert part.completes == (len(items[-1]) == size)
        if part.completes:
            items.append([])
    assert [len(item) for item in items[:-1]] == [size] * (sum(rows) // size)
    assert [row for item in items for row in item] == everything.tolist()


def test_without_a_size_each_batch_is_an_item():
    batches = [torch.zeros(3), torch.tensor(1.0), (torch.zeros(2), torch.zeros(1, 2))]
    slices = list(batch_slices(batches, None, tensors_of))
    assert [part.batch for part in slices] == batches
    assert all(part.completes for part in slices)


def test_a_cut_is_a_view():
    batch = torch.zeros(4)
    first, _ = batch_slices([batch], 2, tensors_of)
    first.tensors[0][0] = 1
    assert batch[0] == 1


@pytest.mark.parametrize(
    ("batch", "size", "text"),
    [
        (torch.zeros(2).to_sparse(), None, "dense tensors"),
        (torch.zeros(2, device="meta"), None, "tensors of the CPU, got one of meta"),
        (torch.tensor(1.0), 2, "without rows"),
        ((torch.zeros(2), torch.zeros(3)), 2, r"\[2, 3\]"),
    ],
)
def test_what_cannot_be_shared_or_cut_is_refused(batch, size, text):
    with pytest.raises(BatchError, match=text):
        list(batch_slices([batch], size, tensors_of))
