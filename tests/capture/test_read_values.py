"""Check that values which forward or backward read stay tensors, and that results are the same."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import ipu_dynamo
from ipu_dynamo.torch_compile.backend import ipu


def compare(call, *inputs, fullgraph=True):
    """Results and gradients of `call`, compiled and plain."""
    found, expected = [], []
    for function, into in (
        (torch.compile(call, backend=ipu, fullgraph=fullgraph, options={"engine": "eager"}), found),
        (call, expected),
    ):
        mine = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        result = function(*mine)
        (result * torch.arange(1.0, 1 + result.numel()).view_as(result)).sum().backward()
        into += [result.detach(), *(x.grad for x in mine if x.requires_grad)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.examples(15)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
    density=st.sampled_from([0.0, 0.5, 1.0]),
    fullgraph=st.booleans(),
)
def test_a_learned_value_fills_masked_places(shape, data, density, fullgraph):
    masked = data.draw(st.integers(1, len(shape)))
    first = data.draw(st.integers(masked, len(shape)))  # the value has the dims from here on
    x = torch.randn(shape, requires_grad=True)
    mask = torch.rand(shape[:masked]) < density
    value = torch.randn(shape[first:], requires_grad=True)

    def fill(x: Tensor, value: Tensor) -> Tensor:
        x = x.clone()
        x[mask] = value
        return x

    torch._dynamo.reset()
    compare(fill, x, value, fullgraph=fullgraph)


@pytest.mark.filterwarnings("ignore:PyTorch breaks the graph")
@pytest.mark.parametrize("learned", [(True, False), (False, True), (True, True)])
def test_masked_places_are_changed_in_place_where_the_graph_may_break(learned):
    torch.manual_seed(0)
    mask = torch.rand(4, 3) > 0.5
    x, factor = (
        torch.randn(shape, requires_grad=wanted)
        for shape, wanted in zip(((4, 3), ()), learned, strict=True)
    )

    def scale(x, factor):
        y = x.sin()
        y[mask] *= factor
        return y

    def fill(x, value):
        y = x.sin()
        y[mask] = value
        return y

    torch._dynamo.reset()
    compare(scale, x, factor, fullgraph=False)
    compare(fill, x, factor, fullgraph=False)


@pytest.mark.examples(15)
@given(
    indices=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    dim=st.integers(-2, 1),
    fullgraph=st.booleans(),
)
def test_a_learned_value_fills_indices(indices, dim, fullgraph):
    x, value = torch.randn(4, 4, requires_grad=True), torch.randn((), requires_grad=True)
    index = torch.tensor(indices)
    torch._dynamo.reset()
    compare(lambda x, value: x.index_fill(dim, index, value), x, value, fullgraph=fullgraph)


def test_hidden_values_do_not_reach_the_gradient():
    """A gradient that is infinite outside the mask stays outside."""

    def fill(x: Tensor, value: Tensor) -> Tensor:
        x = x.clone()
        x[torch.tensor([True, False, True])] = value
        return 1 / x

    x, value = torch.zeros(3, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    compare(fill, x, value)


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_a_number_of_the_model_is_computed_in_the_program(shape):
    def run(x: Tensor) -> tuple[Tensor, float]:
        total = (x * 2).sum().reshape(shape)
        return x / total.item(), total.item()

    x = torch.rand(3)
    (scaled, total), (expected, expected_total) = (
        f(x)
        for f in (torch.compile(run, backend=ipu, fullgraph=True, options={"engine": "eager"}), run)
    )
    assert type(total) is float
    assert total == pytest.approx(expected_total)
    torch.testing.assert_close(scaled, expected)


def test_what_stays_is_refused():
    with pytest.raises(ipu_dynamo.CompileError, match="depends on the values of a tensor"):
        torch.compile(lambda x: x[x > 0].exp(), backend=ipu, fullgraph=True)(torch.randn(3))
