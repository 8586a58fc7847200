"""Check that tensor types print, read back and count their bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.program import TensorType
from ipu_dynamo.program.ir.types import byte_text

DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)},
    key=str,
)
types = st.builds(
    TensorType, st.sampled_from(DTYPES), st.lists(st.integers(0, 99), max_size=4).map(tuple)
)


@given(type_=types)
def test_printed_type_reads_back(type_):
    assert TensorType.parse(str(type_)) == type_


def test_types_print_in_the_short_form():
    assert str(TensorType(torch.float32, (4, 8))) == "f32[4,8]"
    assert str(TensorType(torch.bfloat16, ())) == "bf16[]"
    assert str(TensorType(torch.float8_e4m3fn, (1,))) == "float8_e4m3fn[1]"


@given(type_=types)
def test_nbytes_are_those_of_the_tensor(type_):
    elements = torch.Size(type_.shape).numel()
    assert type_.nbytes == elements * type_.dtype.itemsize


def test_type_of_a_tensor():
    assert TensorType.of(torch.zeros(2, 3, dtype=torch.int64)) == TensorType(torch.int64, (2, 3))


@pytest.mark.parametrize("text", ["f32", "f33[1]", "[1]", "f32[1", "f32[a]", "nn[1]", "f32[1]x"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="not a tensor type"):
        TensorType.parse(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")],
)
def test_bytes_are_written_for_people(nbytes, text):
    assert byte_text(nbytes) == text
