"""Check the matmul of repeated steps against float64, for sizes and strides of every kind."""

import ctypes

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from ipu_dynamo.runtime.engines.replay.native_library import native_library

pytestmark = pytest.mark.inductor
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 128, 255, 256, 257, 300, 600]))


BIASES = st.sampled_from(["none", "row", "column", "all", "transposed"])


def matmul(a: Tensor, b: Tensor, bias: Tensor | None, gap: int) -> Tensor:
    """By the library, into a part of memory whose rest is watched."""
    library = native_library()
    assert library is not None
    (m, depth), n = a.shape, b.shape[1]
    memory = torch.full((m + 1, n + gap), 7.0)
    strides = (0, 0) if bias is None else bias.stride()
    numbers = (*a.stride(), *b.stride(), n + gap, *strides, m, n, depth)
    a0, a1, b0, b1, row, *sizes = map(ctypes.c_int64, numbers)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, memory)]
    added = ctypes.c_void_p(bias.data_ptr() if bias is not None else None)
    library.ipu_matmul(pointers[0], a0, a1, pointers[1], b0, b1, pointers[2], row, added, *sizes)
    assert (memory[m] == 7).all()
    assert (memory[:m, n:] == 7).all()
    return memory[:m, :n]


def laid_out(rows: int, columns: int, how: str, seed: int) -> Tensor:
    """Random values, in rows, in columns, or apart from each other."""
    generator = torch.Generator().manual_seed(seed)
    match how:
        case "rows":
            return torch.randn(rows, columns, generator=generator)
        case "columns":
            return torch.randn(columns, rows, generator=generator).t()
        case "gaps":
            return torch.randn(rows, columns + 3, generator=generator)[:, :columns]
        case _:
            return torch.randn(rows, columns, 2, generator=generator)[..., 0]


LAYOUTS = st.sampled_from(["rows", "columns", "gaps", "apart"])


@given(m=SIZES, n=SIZES, depth=SIZES, a=LAYOUTS, b=LAYOUTS, bias=BIASES, gap=st.integers(0, 3))
@example(m=16, n=128, depth=784, a="rows", b="columns", bias="row", gap=0)  # dot products
@example(m=5, n=7, depth=67, a="gaps", b="columns", bias="column", gap=2)
@example(m=32, n=128, depth=64, a="rows", b="columns", bias="row", gap=0)  # packed
@example(m=128, n=784, depth=16, a="columns", b="rows", bias="none", gap=0)
@example(m=9, n=33, depth=513, a="rows", b="rows", bias="column", gap=1)  # in three parts
def test_a_matmul_is_that_of_float64(m, n, depth, a, b, bias, gap):
    left, right = laid_out(m, depth, a, 0), laid_out(depth, n, b, 1)
    added = {
        "none": torch.zeros(m, n),
        "row": laid_out(1, n, "rows", 2).expand(m, n),
        "column": laid_out(m, 1, "rows", 2).expand(m, n),
        "all": laid_out(m, n, "gaps", 2),
        "transposed": laid_out(m, n, "columns", 2),
    }[bias]
    expected = left.double() @ right.double() + added.double()
    bound = left.double().abs() @ right.double().abs() + added.double().abs()
    made = matmul(left, right, None if bias == "none" else added, gap)
    apart = (made.double() - expected).abs()
    assert (apart <= 1e-6 * (1 + depth / 64) * bound).all()


def test_infinities_and_nans_stay_where_they_belong():
    left, right = torch.ones(9, 40), torch.ones(40, 33)
    left[3, 5], right[7, 20] = torch.inf, torch.nan
    made, expected = matmul(left, right, None, 0), left @ right
    assert torch.equal(made.isnan(), expected.isnan())
    assert torch.equal(made.isinf(), expected.isinf())
