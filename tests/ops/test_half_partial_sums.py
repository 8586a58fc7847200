"""Check products with half partial sums: exact where halves are, else within the stated bound."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.ops.precision import half_partial_sums as ops

EPSILON = 2.0**-11  # of float16, rounding to nearest


def integers(*shape, seed=0):
    """Small integers: their products and sums are exact in half precision."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).half()


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@st.composite
def convolutions(draw):
    """Sizes of a convolution: (x, weight), stride, padding, dilation, groups."""
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))

    def sizes(low, high):
        return [draw(st.integers(low, high)) for _ in range(dims)]

    kernel, dilation = sizes(1, 3), sizes(1, 2)
    places = [d * (k - 1) + draw(st.integers(1, 3)) for d, k in zip(dilation, kernel, strict=True)]
    x = (draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), *places)
    weight = (groups * draw(st.integers(1, 2)), x[1] // groups, *kernel)
    return (x, weight), sizes(1, 3), sizes(0, 2), dilation, groups


@given(case=convolutions(), chunk=st.sampled_from([1, 3, 64]), seed=st.integers(0, 9))
def test_convolutions_of_small_integers_are_exact(case, chunk, seed):
    shapes, *geometry = case
    x, weight = (integers(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    wide_x, wide_weight = (t.double().requires_grad_() for t in (x, weight))
    expected = convolve(wide_x, wide_weight, None, *geometry)
    gradient = integers(*expected.shape, seed=seed + 2)
    expected.backward(gradient.double())
    found = ops.conv(x, weight, *geometry, chunk)
    of_input = ops.conv_input(list(x.shape), gradient, weight, *geometry, chunk)
    of_weight = ops.conv_weight(list(weight.shape), gradient, x, *geometry, chunk)
    assert all(result.is_contiguous() for result in (found, of_input, of_weight))
    assert torch.equal(found, expected.detach().half())
    assert torch.equal(of_input, wide_x.grad.half())
    assert torch.equal(of_weight, wide_weight.grad.half())


def exact_and_bound(a, b, chunk):
    """The product in float64, and how far it may be from what is computed: the stated bound.

    A number that is rounded is as large as the exact one and what that is off by already.
    """
    exact = off = torch.zeros(())
    for start in range(0, a.shape[-1], chunk):
        left, right = (
            a[..., start : start + chunk].double(),
            b[..., start : start + chunk, :].double(),
        )
        part = left @ right
        wide = (left.abs() @ right.abs()) * chunk * 2.0**-24  # of the sum in float32
        exact, off = exact + part, off + wide + rounding(part.abs() + wide)
        if start > 0:
            off = off + rounding(exact.abs() + off)
    return exact, off


def rounding(size):
    """How far a half may be from a number of this magnitude."""
    return torch.clamp(EPSILON * size, min=2.0**-25)


@given(
    shape=st.tuples(*[st.integers(1, 5)] * 2, st.integers(1, 300), st.integers(1, 5)),
    chunk=st.sampled_from([16, 64, 128]),
    seed=st.integers(0, 99),
)
def test_a_product_stays_in_its_bound(shape, chunk, seed):
    batch, m, k, n = shape
    a, b = normal(batch, m, k, seed=seed), normal(batch, k, n, seed=seed + 1)
    exact, bound = exact_and_bound(a, b, chunk)
    assert ((ops.matmul(a, b, chunk).double() - exact).abs() <= bound).all()


large_products = given(
    size=st.sampled_from([2.0**-9, 0.1, 1.0]),
    offset=st.sampled_from([0.0, 0.0, 0.25]),
    seed=st.integers(0, 10**9),
    first=st.integers(0, 31),
)


def check_large_product(chunk, size, offset, seed, first):
    """Compute a whole product of 512 x 4,096 x 512, and look at every 32nd of its rows."""
    a = ((normal(512, 4096, seed=seed).float() + offset) * size).half()
    b = (normal(4096, 512, seed=seed + 1).float() + offset).half()
    found, rows = ops.matmul(a, b, chunk), slice(first, None, 32)
    exact, bound = exact_and_bound(a[rows], b, chunk)
    off = (found[rows].double() - exact).abs()
    assert (off <= bound).all()
    assert off.mean() > 2.0**-12 * exact.abs().mean() / 4  # there is a rounding to bound


@pytest.mark.examples(2)
@pytest.mark.parametrize("chunk", [16, 64, 128])
@large_products
def test_some_large_products_stay_in_their_bound(chunk, size, offset, seed, first):
    check_large_product(chunk, size, offset, seed, first)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 64, 128])
@large_products
def test_large_products_stay_in_their_bound(chunk, size, offset, seed, first):
    check_large_product(chunk, size, offset, seed, first)


def test_the_error_grows_with_the_reduction_and_float_partials_are_closer():
    a, b = normal(16, 8192), normal(8192, 16, seed=1)

    def error(product, depth):
        return (product.double() - a[:, :depth].double() @ b[:depth].double()).abs().mean()

    lengths = (64, 512, 4096, 8192)
    errors = [error(ops.matmul(a[:, :k], b[:k], 16), k) for k in lengths]
    floats = [error((a[:, :k].float() @ b[:k].float()).half(), k) for k in lengths]
    assert errors == sorted(errors)
    assert all(half > wide for half, wide in zip(errors, floats, strict=True))


@pytest.mark.parametrize("op", [ops.matmul, ops.conv, ops.conv_input, ops.conv_weight])
def test_shapes_are_known_without_computing(op):
    geometry = ([2, 1], [1, 0], [1, 2], 2, 16)
    x, weight, out = normal(2, 4, 7, 8), normal(6, 2, 3, 2), normal(2, 6, 4, 6)
    arguments = {
        ops.matmul: (normal(2, 3, 4), normal(2, 4, 5), 16),
        ops.conv: (x, weight, *geometry),
        ops.conv_input: (list(x.shape), out, weight, *geometry),
        ops.conv_weight: (list(weight.shape), out, x, *geometry),
    }[op]
    torch.library.opcheck(op, arguments)
