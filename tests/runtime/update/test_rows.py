"""Check which tensors lie one behind the other, and that each counts its own writes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.runtime.update.rows import row_of, zeros_in_a_row

SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=SHAPES, dtype=st.sampled_from([torch.float32, torch.float16, torch.int64]))
def test_a_row_is_what_its_tensors_are(shapes, dtype):
    tensors = zeros_in_a_row([torch.empty(shape) for shape in shapes], dtype)
    assert [t.shape for t in tensors] == [torch.Size(shape) for shape in shapes]
    row = row_of(tensors)
    row.copy_(torch.arange(row.numel()))
    assert torch.equal(row, torch.cat([t.reshape(-1) for t in tensors]))
    assert row.dtype == dtype


def test_each_counts_what_is_written_into_it():
    first, second = zeros_in_a_row([torch.empty(2), torch.empty(2)], torch.float32)
    before = second._version
    first.add_(1)
    assert second._version == before
    assert torch.equal(second, torch.zeros(2))


@pytest.mark.parametrize("what", ["order", "gap", "memory", "layout", "dtype"])
def test_what_lies_otherwise_is_no_row(what):
    tensors = zeros_in_a_row([torch.empty(2, 3)] * 4, torch.float32)
    others = {
        "order": tensors[::-1],
        "gap": [tensors[0], tensors[2]],
        "memory": [tensors[0], zeros_in_a_row([torch.empty(2, 3)] * 2, torch.float32)[1]],
        "layout": [tensors[0].t(), tensors[1]],
        "dtype": [tensors[0], tensors[1].view(torch.int32)],
    }
    assert row_of(tensors) is not None
    assert row_of(others[what]) is None
