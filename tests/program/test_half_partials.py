"""Check products with half partial sums: exact where halves are, else within the stated bound."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.program import half_partials as ops

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


@given(
    shape=st.tuples(*[st.integers(1, 5)] * 2, st.integers(1, 300), st.integers(1, 5)),
    chunk=st.sampled_from([16, 64, 128]),
    seed=st.integers(0, 99),
)
def test_a_product_stays_in_its_bound(shape, chunk, seed):
    batch, m, k, n = shape
    a, b = normal(batch, m, k, seed=seed), normal(batch, k, n, seed=seed + 1)
    found = ops.matmul(a, b, chunk).double()
    exact = a.double() @ b.double()
    parts = [
        a[..., at : at + chunk].double() @ b[:, at : at + chunk].double()
        for at in range(0, k, chunk)
    ]
    sums = torch.stack(parts).cumsum(0)
    # every chunk is rounded when it is made, every sum but the first when it is added
    bound = EPSILON * (torch.stack(parts).abs().sum(0) + sums[1:].abs().sum(0)) * (1 + 1e-2)
    bound += EPSILON * 2.0**-14 * 2 * len(parts)  # where halves are subnormal
    assert ((found - exact).abs() <= bound).all()


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
