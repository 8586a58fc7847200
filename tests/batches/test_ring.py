"""Check the slots of items in shared memory."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.batches.ring import Ring, RingLayout
from ipu_dynamo.errors import BatchError

DTYPES = [torch.float32, torch.float16, torch.bool, torch.int64, torch.complex64, torch.uint8]


def ring_of(tensors, slots=2, rows=None):
    ring, file = Ring.create(RingLayout.of(tensors, slots=slots, rows=rows))
    other = Ring(ring.layout, file)
    os.close(file)
    return ring, other


@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    slots=st.integers(1, 3),
)
def test_both_ends_see_every_slot(shapes, dtype, slots):
    items = [[torch.randint(0, 2, shape).to(dtype) for shape in shapes] for _ in range(slots)]
    ring, other = ring_of(items[0], slots)
    for slot, item in enumerate(items):
        ring.check(item, fewer_rows=False)
        ring.write(slot, item, 0)
    for slot, item in enumerate(items):
        for expected, tensor in zip(item, other.read(slot, None), strict=True):
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected)


def test_an_item_is_written_in_parts_and_read_up_to_a_row():
    whole = torch.arange(10.0).view(5, 2)
    ring, other = ring_of([whole[:1]], rows=5)
    ring.write(1, [whole[:3]], 0)
    ring.write(1, [whole[3:]], 3)
    assert torch.equal(other.read(1, None)[0], whole)
    assert torch.equal(other.read(1, [4])[0], whole[:4])


def test_reading_copies_nothing():
    ring, other = ring_of([torch.zeros(3)])
    (tensor,) = other.read(0, None)
    ring.write(0, [torch.ones(3)], 0)
    assert tensor.tolist() == [1, 1, 1]


def test_flags_are_shared():
    ring, other = ring_of([torch.zeros(3)], slots=3)
    ring.flag(1, full=True)
    assert other.full.tolist() == [0, 1, 0]
    other.flag(1, full=False)
    assert sum(ring.full) == 0


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.full((2, 3), 0.1, dtype=torch.float64), r"float64\[2, 3\].*float32\[2, 3\]"),
        (torch.zeros(2, 4), r"float32\[2, 4\].*float32\[2, 3\]"),
        (torch.zeros(1, 3), r"float32\[1, 3\]"),
        (torch.zeros(3, 3), r"float32\[3, 3\]"),
        (torch.zeros(()), r"float32\[\]"),
    ],
)
def test_unlike_tensors_are_refused(tensor, text):
    ring, _ = ring_of([torch.zeros(2, 3)])
    with pytest.raises(BatchError, match=text):
        ring.check([tensor], fewer_rows=False)
    with pytest.raises(BatchError, match="2 tensors"):
        ring.check([torch.zeros(2, 3)] * 2, fewer_rows=False)


def test_fewer_rows_can_be_allowed():
    ring, _ = ring_of([torch.zeros(2, 3), torch.zeros(())])
    ring.check([torch.zeros(1, 3), torch.zeros(())], fewer_rows=True)
    for shape in [(3, 3), (1, 2), (1,)]:
        with pytest.raises(BatchError, match="all items must be alike"):
            ring.check([torch.zeros(shape), torch.zeros(())], fewer_rows=True)


NAN = float("nan")


@pytest.mark.parametrize(
    ("dtype", "values", "fits"),
    [
        (torch.int64, torch.tensor([2.0, -3.0]), True),
        (torch.int64, torch.tensor([2.0, 0.5]), False),
        (torch.int64, torch.tensor([2.0, NAN]), False),
        (torch.float32, torch.tensor([2, 2**24]), True),
        (torch.float32, torch.tensor([2, 2**24 + 1]), False),
        (torch.float16, torch.tensor([0.5, NAN]), True),
        (torch.float16, torch.tensor([0.5, 1e6]), False),
        (torch.bool, torch.tensor([0, 1]), True),
        (torch.bool, torch.tensor([0, 2]), False),
        (torch.float32, torch.tensor([1 + 1j, 0]), False),
    ],
)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_another_dtype_fits_if_no_value_changes(dtype, values, fits):
    ring, other = ring_of([torch.zeros(2, dtype=dtype)])
    if not fits:
        with pytest.raises(BatchError, match="all items must be alike"):
            ring.check([values], fewer_rows=False)
        return
    ring.check([values], fewer_rows=False)
    ring.write(0, [values], 0)
    (tensor,) = other.read(0, None)
    assert tensor.dtype == dtype
    assert torch.equal(tensor.to(values.dtype).nan_to_num(7), values.nan_to_num(7))
