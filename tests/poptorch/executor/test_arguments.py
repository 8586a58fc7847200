"""Check that arguments are bound as Python binds them, and that later calls match the first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import poptorch
from poptorch.arguments import ExpectedCall, bind, parameters_of

TENSORS = st.builds(lambda rows: torch.ones(rows, 2), st.integers(1, 3))
VALUES = st.none() | st.booleans() | st.integers() | st.text() | TENSORS
STRUCTURES = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def forward(a, b=2, *c, d=None, **e):
    return a


PARAMETERS = parameters_of(forward)


@given(a=STRUCTURES, c=st.lists(STRUCTURES, max_size=2), e=STRUCTURES)
def test_rebuilding_gives_the_arguments_back(a, c, e):
    call = bind(PARAMETERS, [a, 1, *c], {"d": a, "e0": e})
    tensors = [leaf for _, leaf in call.leaves() if isinstance(leaf, Tensor)]
    args, kwargs = call.rebuild(tensors)
    again = bind(PARAMETERS, args, kwargs)
    assert [name for name, _ in again.leaves()] == [name for name, _ in call.leaves()]
    assert all(x is y for (_, x), (_, y) in zip(call.leaves(), again.leaves(), strict=True))


@given(a=STRUCTURES)
def test_an_equal_call_matches(a):
    call = bind(PARAMETERS, [a], {})
    found = ExpectedCall(call).tensors(bind(PARAMETERS, [], {"a": a}))
    assert [id(t) for t in found] == [id(x) for _, x in call.leaves() if isinstance(x, Tensor)]


@given(a=STRUCTURES)
def test_names_are_unique(a):
    names = [name for name, _ in bind(PARAMETERS, [a, a, a], {"d": a, "x": a}).leaves()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "words"),
    [
        ((), {}, poptorch.Error, "Mandatory parameter x missing"),
        ((1, 2, 3), {}, AssertionError, "Too many arguments provided"),
        ((1,), {"x": 2}, AssertionError, "x is passed more than once"),
        ((1,), {"z": 2}, AssertionError, "Unknown arguments: z"),
    ],
)
def test_binding_refuses(args, kwargs, error, words):
    with pytest.raises(error, match=words):
        bind(parameters_of(lambda x, y=0: x), args, kwargs)


X = torch.zeros(2)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((X,), (X.double(),), "Data type mismatch for a: expected torch.float32 but got"),
        ((X,), (torch.zeros(3),), r"Shape mismatch for a: expected torch.Size\(\[2\]\) but got"),
        ((X,), (None,), "Type mismatch for a: expected .*Tensor.* but got .*None"),
        (([X],), ((X,),), "Type mismatch for a: expected .*list.* but got .*tuple"),
        (([X],), ([X, X],), "Length mismatch for a"),
        (([X, 1],), ([X, 2],), r"Value mismatch for a\[1\]: expected 1 but got 2"),
        (({"x": X},), ({"y": X},), "Unexpected arguments: y. Missing arguments: x."),
        ((X, 2, X), (X, 2), "positional arguments mismatch: expected 3 arguments but got 2"),
    ],
)
def test_a_different_call_is_refused(first, second, words):
    expected = ExpectedCall(bind(PARAMETERS, first, {}))
    with pytest.raises(poptorch.Error, match=words) as caught:
        expected.tensors(bind(PARAMETERS, second, {}))
    assert "destroy()" in str(caught.value)


def test_the_order_of_keys_does_not_matter():
    executor = poptorch.inferenceModel(lambda d: d["x"] / d["y"])
    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    assert executor({"x": x, "y": y}) == 0.5
    assert executor({"y": y, "x": x}) == 0.5


def test_arguments_may_have_the_names_of_parameters():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([3.0]))

        def forward(self, weight):
            return self.weight * weight

    assert poptorch.inferenceModel(Scale())(torch.tensor([2.0])) == 6


def test_empty_tensors_are_refused():
    with pytest.raises(poptorch.Error, match=r"Zero-sized .* \(Got shape \[0, 2\]\)"):
        poptorch.inferenceModel(lambda x: x)(torch.zeros(0, 2))


def test_a_function_that_does_not_tell_its_parameters_takes_any():
    x = torch.tensor([[-1.0, 2.0]])
    logsigmoid = poptorch.inferenceModel(torch.nn.functional.logsigmoid)
    torch.testing.assert_close(logsigmoid(x), torch.nn.functional.logsigmoid(x))
